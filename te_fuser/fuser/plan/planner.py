"""The plan of the covers that keep what memory allows: what a kept byte is worth, budgets, what is said of a plan.

Backward is covered first: that says which values it reads. Then forward, which must emit them.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser import dtypes
from te_fuser.fuser.graph.refs import VALUE
from te_fuser.fuser.plan.covers import Covering
from te_fuser.fuser.plan.eager_fallback import is_recordable, with_recorded
from te_fuser.fuser.plan.plan import LAMBDA, Plan, size_text
from te_fuser.fuser.plan.prices import Prices
from te_fuser.fuser.plan.problem import Options, Problem
from te_fuser.fuser.plan.segmenting import finish, segments
from te_fuser.ops.operations import UnfusedOperation

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Choice

_HARD_PRESSED = 64.0  # where a budget leaves no choice
_AT_ANY_PRICE = 4096.0  # and where launches cost more than that
_GIVEN_BACK = 0.5


@dataclass(frozen=True)
class Keeping:
    """Worth of what a plan keeps: `weight` passes over each byte; `held` values stay anyway."""

    weight: float
    held: frozenset[int] = frozenset()


MakePlan = Callable[[Keeping], Plan]


def plan_for_memory(memory: str | int, make: MakePlan, choices_of: Callable[[Keeping], Sequence[Choice]]) -> Plan:
    """The plan for a name in LAMBDA or a budget in bytes."""
    if isinstance(memory, int):
        return _within(memory, make)
    keeping = Keeping(LAMBDA[memory])
    if memory == "balanced":
        choices = choices_of(keeping)
        saved = sum(c.bytes for c in choices if c.recomputed)
        keeping = replace(keeping, held=_given_back(choices, saved * _GIVEN_BACK, True))
    return make(keeping)


def _within(budget: int, make: MakePlan) -> Plan:
    """The fastest plan whose kept activations fit; the leanest one, with a note, when none does."""
    for weight in (LAMBDA["fast"], LAMBDA["lean"], _HARD_PRESSED, _AT_ANY_PRICE):
        plan = make(Keeping(weight))
        room = budget - plan.kept_bytes()
        if room >= 0:
            held = _given_back(plan.choices, room, False)
            more = make(Keeping(weight, held)) if held else plan
            return more if more.kept_bytes() <= budget else plan
    least = f"this one keeps the least, {plan.kept_bytes()} bytes with sizes rounded up to powers of two"
    return replace(plan, notes=(*plan.notes, f"no plan keeps within {budget} bytes; {least}"))


def _given_back(choices: Iterable[Choice], room: float, alike: bool) -> frozenset[int]:
    """The values to keep of what is computed again: the dearest for their bytes, as far as there is room.

    Where it is `alike`, equal values of several layers are all kept or none.
    """
    again = sorted([c for c in choices if c.recomputed], key=lambda c: (-c.seconds / max(c.bytes, 1), c.bytes, c.value))
    held: set[int] = set()
    for _, group in itertools.groupby(again, key=lambda c: (c.value, c.bytes) if alike else c.root):
        together = list(group)
        size = sum([c.bytes for c in together])
        if size <= room:
            room -= size
            held |= {c.root for c in together}
    return frozenset(held)


_LARGE = 1 << 30  # bytes of an intermediate result that are worth a warning

# A direction takes the larger of what the device and the host take. No shortest path sees that: where a plan would wait
# for the host, others are made for which so much of the host's time counts, and the best of all is taken.
_SHARES = (0.5, 1.0, 4.0)


def _cheapest(problem: Problem) -> tuple[Plan, Prices]:
    """The plan at the least price for the memory that was asked for, and its prices."""
    prices = Prices(problem)
    covering = Covering(prices)
    found = [_covered(covering)]
    for share in _SHARES:
        if not found[-1].waits_for_host:
            break
        found.append(_covered(covering, share))
    options = problem.options

    def price(plan: Plan) -> tuple[float, float]:
        """Bytes beyond a budget, then seconds, with what keeping is worth."""
        if isinstance(options.memory, int):
            return max(plan.kept_bytes() - options.memory, 0), plan.seconds()
        return 0.0, plan.seconds() + plan.kept_bytes() * LAMBDA[options.memory] / options.device.bandwidth

    return min(found, key=price).chosen(), prices


def _covered(covering: Covering, share: float = 0.0) -> Plan:
    prices = covering.prices

    def weighed(keeping: Keeping) -> Plan:
        plan = finish(prices, covering.cover(keeping, share))
        return with_recorded(prices, plan, keeping.weight)

    def choices(keeping: Keeping) -> Sequence[Choice]:
        covers = covering.cover(keeping, share)
        parts = segments(prices, covers)
        recordable = prices.once((is_recordable, parts), lambda: any(is_recordable(prices.problem, *p) for p in parts))
        return weighed(keeping).choices if recordable else covers.choices

    return plan_for_memory(prices.problem.options.memory, weighed, choices)


def add_notes(plan: Plan, prices: Prices) -> Plan:
    """The plan with notes on where its prices and choices come from."""
    options, found = prices.problem.options, []
    if options.tuned:
        listed = ", ".join(f"{place} {choice}" for place, choice in options.tuned.items())
        found.append(f"measured choices of tune(): {listed}")
    if plan.device.estimate:
        found.append(
            f"{plan.device.name} was not measured: its roofline, which times and choices come from, is an estimate by "
            f"{plan.device.estimate}; model.tune(x) on such a GPU measures the choices"
        )
    multiplied = {plan.graph.values[plan.graph.nodes[s.start].input].spec.dtype for s in plan.steps if s.cost.flops}
    for group in dict.fromkeys(plan.graph.sums.values()):
        names = [plan.graph.parameters[k].name for k, over in plan.graph.sums.items() if over == group]
        found.append(
            f"gradients of {', '.join(names)} are added up over {group.size} ranks ({group.title}), once a segment"
        )
    if plan.device.link.estimate and [s for s in plan.steps if s.cost.sent]:
        found.append(
            f"what ranks send was not measured on {plan.device.name}: it is priced by {plan.device.link.estimate}"
        )
    for dtype in sorted(plan.device.converts.intersection(map(dtypes.name_of, multiplied))):
        found.append(
            f"products in {dtype} are computed in float32 and rounded once: {plan.device.name} has no instructions for "
            "them"
        )
    return plan.noted(*found, *options.notes)


def _kept_whole(plan: Plan) -> list[str]:
    """Notes on values of which each rank keeps all rows."""
    found, graph = [], plan.graph
    for kept in [k for k in plan.kept if k.ref.kind is VALUE and k.bytes]:
        node = graph.makers[kept.ref.index]
        while node is not None and graph.nodes[node].traits.is_row:
            node = graph.makers[graph.nodes[node].input]
        if node is not None and graph.nodes[node].op.gathers:  # type: ignore[attr-defined]
            found.append(
                f"each rank keeps all rows of {kept.name} ({size_text(kept.bytes)}): only what gradients of weights "
                "alone read, as it was gathered, is gathered again"
            )
    return found


def cover(graph: Graph, options: Options, ends: frozenset[int]) -> tuple[Plan, Prices]:
    """The plan of the covers that keep what memory allows, and its prices; kernels end before the ops in `ends`.

    What ranks gather is kept as each one's part, unless memory does not count, or is more than enough.
    """
    gathers = [n for n in graph.nodes if not n.traits.is_row and n.op.gathers]  # type: ignore[attr-defined]
    if not gathers or options.memory == "fast":
        return _cheapest(Problem(graph, options, ends))
    if isinstance(options.memory, int):
        found = _cheapest(Problem(graph, options, ends))
        if found[0].kept_bytes() <= options.memory:
            return found
    plan, prices = _cheapest(Problem(graph, replace(options, gathers_again=True), ends))
    return plan.noted(*_kept_whole(plan)), prices


def warn_of_large_results(plan: Plan, graph: Graph) -> None:
    """Say once, with the reasons, that an op is left to large intermediate results of its own."""
    for step in plan.forward:
        node = graph.nodes[step.start]
        if step.task.what != "op" or not isinstance(node.op, UnfusedOperation):
            continue
        named = {k: graph.values[v].spec for k, v in node.named_in.items()}
        if node.op.explicit_bytes(graph.values[node.input].spec, named) > _LARGE:
            within = (r for r in plan.refusals if r.start <= step.start < r.stop)
            reasons = dict.fromkeys(f"{r.name}: {r.reason}" for r in within)
            _warn_of_large(node.label, "; ".join(reasons) or "no fusion that could take it is on")


@functools.cache
def _warn_of_large(label: str, why: str) -> None:
    warnings.warn(
        f"te_fuser runs {label} by explicit intermediate results of more than 1 GiB, as no kernel without them takes "
        f"it ({why})",
        RuntimeWarning,
        stacklevel=2,
    )


def entries(plan: Plan) -> Iterable[tuple[str, object]]:
    """Each step as text: its direction, its name, its ops, what it reads and makes."""
    for direction, steps in (("forward", plan.forward), ("backward", plan.backward)):
        for step in steps:
            yield f"{direction} {str(step).removeprefix('<Step ').removesuffix('>')}", step

"""What is kept for backward: what a kept byte is worth, budgets, and giving back what is dear to compute again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.fuser.plan.plan import Kept, Plan

if TYPE_CHECKING:
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.plan.plan import Choice
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.step import Step

# Seconds that a kept byte is worth, in passes over it at copy speed: balanced computes a value again when that costs
# at most two passes over the bytes it saves. Most values cost one pass for each of their bytes, so the price alone
# would take all or nothing: balanced then keeps again what is dearest for its bytes, up to half of what it had saved.
LAMBDA = {"fast": 0.0, "balanced": 2.0, "lean": 8.0}
_HARD_PRESSED = 64.0  # where a budget leaves no choice
_AT_ANY_PRICE = 4096.0  # and where launches cost more than that
_GIVEN_BACK = 0.5


@dataclass(frozen=True)
class Keeping:
    """What a plan is made for: a kept byte is worth `weight` passes over it, the values in `held` are kept anyway."""

    weight: float
    held: frozenset[int] = frozenset()


MakePlan = Callable[[Keeping], Plan]


def plan_for_memory(memory: str | int, make: MakePlan, choices_of: Callable[[Keeping], Sequence[Choice]]) -> Plan:
    """The plan for a name in LAMBDA or a budget in bytes.

    Args:
        make: plans for a given keeping.
        choices_of: the choices of that plan, which may be known before the rest of it.
    """
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
    note = f"no plan keeps within {budget} bytes; {least}"
    return replace(plan, notes=(*plan.notes, note))


def _given_back(choices: Iterable[Choice], room: float, alike: bool) -> frozenset[int]:
    """The values to keep of what is computed again: the dearest for their bytes, as far as there is room.

    Args:
        alike: whether equal values of several layers are all kept or none.
    """
    again = sorted([c for c in choices if c.recomputed], key=lambda c: (-c.dearness, c.bytes, c.value))
    held: set[int] = set()
    for _, group in itertools.groupby(again, key=lambda c: (c.value, c.bytes) if alike else c.root):
        together = list(group)
        size = sum([c.bytes for c in together])
        if size <= room:
            room -= size
            held |= {c.root for c in together}
    return frozenset(held)


def kept_by(problem: Problem, prices: Prices, backward: list[Step]) -> tuple[Kept, ...]:
    """Everything that backward steps read and none of them makes."""
    graph = problem.graph
    found: dict[Ref, Kept] = {}
    made = {r for s in backward for _, r in s.outputs}
    for step in backward:
        for name, ref in step.inputs:
            if ref.kind.owner and ref not in found and ref not in made:
                text = f"{step.name}: {name}" if ref.name else ref.label(graph)
                found[ref] = Kept(ref, text, prices.size(ref), graph.owner(ref))
    return tuple(found.values())

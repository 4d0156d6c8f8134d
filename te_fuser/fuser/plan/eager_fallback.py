"""Segments as functions of PyTorch's that autograd records, where a node of our own costs more than it gains."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import AS_MADE, Ref, gradient_ref, saved_ref
from te_fuser.fuser.plan.cover_steps import kept_by, with_forms
from te_fuser.fuser.plan.plan import DIRECTIONS, Refusal, SavedTensor
from te_fuser.fuser.plan.prices import flops_of, torch_function_of
from te_fuser.fuser.steps.function_tasks import RecordedBackwardTask, recorded_task
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions import registry
from te_fuser.fusions.match import Cost

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.plan.prices import Named, Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.step import Step
    from te_fuser.ops.tensor_function import TorchFunction

_LEAST_GAIN = 0.02  # of the plan's time: less than what prices know
_VIEW = Cost(launches=0, calls=1.0)


@dataclass(frozen=True)
class _FunctionCall:
    """A function over one op, or over one and what the next one adds."""

    function: TorchFunction
    nodes: tuple[Node, ...]
    reads: tuple[Ref, ...]

    @property
    def output(self) -> int:
        return self.nodes[-1].output


def with_recorded(prices: Prices, plan: Plan, weight: float) -> Plan:
    """The plan with segments recorded where cheaper; a kept byte is worth `weight` passes over it."""
    problem = prices.problem

    def price(p: Plan) -> float:
        return p.seconds() + p.kept_bytes() * weight / problem.options.device.bandwidth

    budget = problem.options.memory if isinstance(problem.options.memory, int) else None
    for k, segment in enumerate(plan.segments):
        part = segment.start, segment.stop
        made = functools.partial(_recorded, prices, *part)
        steps = prices.once((_recorded, *part), made) if segment.backward else None
        if steps is None:
            continue
        forward, backward, kept = steps
        recorded = replace(segment, forward=forward, backward=backward, kept=kept, recorded=True)
        segments = (*plan.segments[:k], recorded, *plan.segments[k + 1 :])
        inside = {v for n in problem.nodes[segment.start : segment.stop] for v in (n.output, *n.named_out)}
        choices = tuple(c for c in plan.choices if c.root not in inside)
        other = replace(plan, segments=segments, choices=choices)
        fits = budget is None or other.kept_bytes() <= max(budget, plan.kept_bytes())
        gain = price(plan) - price(other)
        if fits and gain > _LEAST_GAIN * plan.seconds():
            covers = f"ops {segment.start}-{segment.stop - 1}"
            why = f"predicted {gain * 1e6:.1f} us more than PyTorch's functions for {covers}"
            lost = list(plan.refusals)
            for direction in DIRECTIONS:  # the fusions that it would have run
                names = {(s.name, s.start, s.stop) for s in segment.steps(direction) if s.task.what == "fusion"}
                lost += [Refusal(direction, start, stop, name, why) for name, start, stop in sorted(names)]
            plan = replace(other, refusals=tuple(lost))
    return plan


def _recorded(
    prices: Prices, start: int, stop: int
) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[SavedTensor, ...]] | None:
    """The steps of a segment as PyTorch's functions, and what these keep; None where that cannot be."""
    problem = prices.problem
    if not is_recordable(problem, start, stop):
        return None
    calls = _calls(problem, problem.nodes[start:stop]) or []
    needing = [call for call in reversed(calls) if prices.graph.needs_grad(call.output)]
    if not needing:
        return None
    forward = with_forms(prices, [_forward(prices, call) for call in calls], set())
    backward = [_backward(prices, call) for call in needing]
    return tuple(forward), tuple(backward), kept_by(prices, backward)


def is_recordable(problem: Problem, start: int, stop: int) -> bool:
    """True where nothing in a segment needs a node of our own, as draws do."""
    if not problem.options.records or not registry.enabled(registry.RECORDED):
        return False
    nodes = problem.nodes[start:stop]
    sums = problem.graph.sums
    if [n for n in nodes if n.traits.draws or n.op.emits or sums and not sums.keys().isdisjoint(n.parameters.values())]:
        return False
    preferred = any(start <= place < stop for _, place, _ in problem.preferred)
    return not preferred and not any(_needs_own_node(problem, n) for n in nodes)


def _needs_own_node(problem: Problem, node: Node) -> bool:
    """True for an op with a main_grad, a delayed gradient, values in several forms, or a DTensor."""
    graph = problem.graph
    if [p for p in node.parameters.values() if graph.lies[p] is not None]:
        return True
    values = [graph.values[v] for v in (node.input, node.output, *node.named_in.values(), *node.named_out)]
    several = any(graph.ref(v.index).form != AS_MADE or v.gradient is not None for v in values)
    roots = {graph.roots[v] for v in node.named_out} - {graph.roots[node.output]}
    marked = any(gradient.by_attributes or gradient.delayed for gradient in node.gradients)
    return bool(marked or several or roots)


def _calls(problem: Problem, nodes: Iterable[Node]) -> list[_FunctionCall] | None:
    """Calls of functions for some ops, in their order; None where one of them has no function."""
    graph, found = problem.graph, list[_FunctionCall]()
    for node in nodes:
        if graph.ref(node.output) == graph.ref(node.input):
            continue  # another name
        function = torch_function_of(problem, node)
        if function is None:
            return None
        joined = _joined(problem, found[-1], function, node) if found else None
        if joined is not None:
            found[-1] = joined
            continue
        refs = [problem.read_ref(node, name) for name in function.reads]
        assert all(r is not None for r in refs)
        found.append(_FunctionCall(function, (node,), tuple(r for r in refs if r is not None)))
    return found


def _joined(problem: Problem, call: _FunctionCall, function: TorchFunction, node: Node) -> _FunctionCall | None:
    """The call before, with what this op adds to its output, if nobody else reads that."""
    value = call.output
    follows = node.input == value and len(call.nodes) == 1
    if not (call.function.takes_addend and function.addend and follows):
        return None
    if problem.read_outside(value, call.nodes[0].index, node.index + 1):
        return None
    addend = problem.read_ref(node, function.addend)
    assert addend is not None
    return _FunctionCall(call.function, (*call.nodes, node), (*call.reads, addend))


# -------------------------------------------------------------------------------------------------------------- steps


def _forward(prices: Prices, call: _FunctionCall) -> Step:
    graph = prices.graph
    inputs = tuple(zip((*call.function.reads, "addend"), call.reads, strict=False))
    outputs = (("output", graph.ref(call.output)),)
    covers, price = (call.nodes[0].index, call.nodes[-1].index + 1), Price(_forward_cost, (call, inputs, outputs))
    return prices.step(call.function.name, covers, inputs, outputs, recorded_task(call.function.function), price)


def _forward_cost(prices: Prices, call: _FunctionCall, inputs: Named, outputs: Named) -> Cost:
    if call.nodes[0].op.views:
        return _VIEW
    return prices.of_launch(inputs, outputs, flops_of(prices.graph, call.nodes[:1]))


def _backward(prices: Prices, call: _FunctionCall) -> Step:
    """Step for the node that PyTorch records, for the plan to show and to price."""
    problem = prices.problem
    function, first = call.function, call.nodes[0]
    named = {k: n for n in call.nodes for k in sorted(problem.needed(n)) if n is first or k != "input"}
    outputs = tuple((f"d_{name}", problem.gradient_target(node, name)) for name, node in named.items())
    kept = {name for k in named for name in function.keeps.get(k, ())}
    saved = [(name, ref) for name in sorted(kept) if (ref := problem.read_ref(first, name)) is not None]
    inputs = (("dy", gradient_ref(call.output)), *saved)
    if kept and function.statistics:
        statistics = saved_ref(first.index, function.name, "statistics")
        inputs = (*inputs, ("statistics", statistics))
    covers, price = (first.index, call.nodes[-1].index + 1), Price(_backward_cost, (call, inputs, outputs))
    return prices.step(f"{function.name} backward", covers, inputs, outputs, RecordedBackwardTask(), price)


def _backward_cost(prices: Prices, call: _FunctionCall, inputs: Named, outputs: Sequence[tuple[str, Ref]]) -> Cost:
    """Cost of operations that give some gradients each, and read what is kept for these."""
    if call.nodes[0].op.views:
        return _VIEW
    operations = [outputs] if call.function.at_once else [(o,) for o in outputs]
    first, total, seconds, count = call.nodes[0], Cost(launches=0), 0.0, 0
    for given in operations:
        names = {"dy", "statistics"} | {k for name, _ in given for k in call.function.keeps.get(name[2:], ())}
        read = [(name, ref) for name, ref in inputs if name in names]
        products = bool(call.function.keeps.get(given[0][0][2:])) if not call.function.at_once else 0
        cost = prices.of_launch(read, given, flops_of(prices.graph, call.nodes[:1]) * products)
        total, seconds, count = total + cost, seconds + prices.seconds(cost, first), count + 1
    host = prices.problem.options.device.host.calls
    node = host["recorded backward"] / (host["torch"] or 1.0)
    return replace(total, seconds=seconds, calls=node + count - 1)

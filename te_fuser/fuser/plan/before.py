"""What is made of parameters before the segments of a call: one step for each maker, for all ops of the list."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import PARAMETER, Ref, parameter_ref
from te_fuser.fuser.steps.make_task import MakeTask
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions.registry import Maker, Wanted, maker_for

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fusions.match import Cost


def with_made(plan: Plan, prices: Prices) -> Plan:
    """The plan with what its fusions read of parameters that are made."""
    forward, backward = (
        {r for s in steps if s.task.what == "fusion" for r in s.reads() if r.kind is PARAMETER}
        for steps in (plan.forward, plan.backward)
    )
    found: dict[Maker, list[tuple[Node, Wanted]]] = {}
    made: set[Ref] = set()
    for node in plan.graph.nodes if forward or backward else ():
        maker = maker_for(node.op)
        if maker is None:
            continue
        refs = {name: parameter_ref(node.parameters[name]) for name in maker.makes}
        wanted = [n for n, r in refs.items() if r in backward or r in forward and n in maker.in_forward]
        wanted = [n for n in wanted if refs[n] not in made]
        if wanted:
            made |= {refs[name] for name in wanted}
            numbers, graph = node.parameters, plan.graph
            given = {name: graph.parameter_specs[numbers[name]] for name in maker.of if name in numbers}
            again = frozenset([name for name in wanted if graph.parameters[numbers[name]].in_parts])
            found.setdefault(maker, []).append((node, Wanted(node.op, given, tuple(wanted), again)))
    if not made:
        return plan
    steps = []
    for maker, items in found.items():
        inputs = [(f"{n.index}.{name}", parameter_ref(n.parameters[name])) for n, w in items for name in w.given]
        outputs = [(f"{n.index}.{name}", parameter_ref(n.parameters[name])) for n, w in items for name in w.makes]
        makes, ops = tuple([w for _, w in items]), tuple([n.index for n, _ in items])
        task, price = MakeTask(maker, makes, plan.x.device, ops), Price(_cost, (maker, makes))
        steps.append(prices.step(maker.name, (ops[0], ops[-1] + 1), inputs, outputs, task, price))
    segments = []
    for segment in plan.segments:  # each says of what it keeps whose it is
        kept = [k._replace(owner="tensor") if k.ref in made else k for k in segment.kept]
        segments.append(replace(segment, kept=tuple(kept)))
    return replace(plan, before=tuple(steps), segments=tuple(segments))


def _cost(prices: Prices, maker: Maker, wanted: tuple[Wanted, ...]) -> Cost:
    return maker.cost(wanted)

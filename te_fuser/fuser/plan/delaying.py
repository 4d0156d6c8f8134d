"""Gradients of weights that products leave to `backward_dw`: the last steps of a segment's backward, run apart."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.plan.overlap import free_steps, retimed

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Plan, SegmentPlan
    from te_fuser.fuser.plan.prices import Prices


def with_delayed(plan: Plan, prices: Prices) -> Plan:
    """The plan with what is left for later behind all other steps of its segment: it runs after the whole backward.

    Gradients that come with others, in one step, are there when backward ends.
    """
    if not [g for n in plan.graph.nodes for g in n.gradients if g.delayed]:
        return plan
    segments = []
    for segment in plan.segments:
        late = _late(segment, plan.graph)
        now = [s for s in segment.backward if id(s) not in late]
        later = [s for s in segment.backward if id(s) in late]
        segments.append(replace(segment, backward=(*now, *later), delayed=len(later)))
    found = retimed(replace(plan, segments=tuple(segments)))
    weights = {r.index for s in found.segments for step in s.late for r in step.writes() if r in s.returned}
    names = [plan.graph.parameters[k].name for k in sorted(weights)]
    return found.noted(f"gradients of {', '.join(names)} are left to backward_dw()") if names else found


def _late(segment: SegmentPlan, graph: Graph) -> set[int]:
    """The ids of the steps that run later."""
    weights = {n.parameters[name] for n in graph.nodes for g in n.gradients if g.delayed for name in g.produces}
    late: set[int] = set()
    for step in free_steps(segment.backward):
        if not weights.isdisjoint([r.index for r in step.writes()]):
            late.add(id(step))
    if not late:
        return late
    needed = {r for r in segment.returned if r is not None}
    for step in reversed(segment.backward):  # so does what gathers for these alone
        if id(step) not in late and not step.chain and needed.isdisjoint(step.writes()):
            late.add(id(step))
        if id(step) not in late:
            needed.update(step.reads())
    return late

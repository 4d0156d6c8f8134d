"""Covers: the cheapest steps for the whole list in each direction, as shortest paths, and how the two meet.

Backward first: its cover says which values it reads, and with joint fusions among its candidates it is the cheapest
by what both directions take (`both_ways`). Then the forward cover, which must emit them. If a forward
fusion was refused only because backward reads what it does not give, a second round lets forward choose freely and
plans backward around it; the cheaper total wins.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import EMITTED, SAVED, STATISTIC, VALUE, Ref
from te_fuser.fuser.plan.candidates import Edge, Ledger, Withheld
from te_fuser.fuser.plan.forward_candidates import ForwardCandidates
from te_fuser.fuser.plan.order import in_running_order
from te_fuser.fuser.plan.paths import shortest

if TYPE_CHECKING:
    from te_fuser.fuser.plan.both_ways import BothWays
    from te_fuser.fuser.plan.keeping import Keeping
    from te_fuser.fuser.plan.plan import Refusal
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.step import Step


@dataclass(frozen=True)
class Covers:
    """What covers the list in both directions, and what was not taken."""

    forward: list[Edge]
    backward: list[Edge]
    refusals: list[Refusal]

    @property
    def length(self) -> int:
        """What both cost together, in ticks."""
        return sum(e.length for e in (*self.forward, *self.backward))


def cover(problem: Problem, prices: Prices, both: BothWays, keeping: Keeping) -> Covers:
    """The cheapest covers that fit together."""
    ledger = Ledger()
    first = _round(problem, prices, both, keeping, Withheld(), ledger)
    assert first is not None  # every op has an edge of its own, and nothing is forbidden
    if not ledger.demand_unmet:
        return first
    second = _second_round(problem, prices, both, keeping)
    return first if second is None or first.length <= second.length else second


def _round(
    problem: Problem, prices: Prices, both: BothWays, keeping: Keeping, limits: Withheld, ledger: Ledger
) -> Covers | None:
    """Backward first, then the forward that gives what it reads; None where something has no candidate left."""
    edges = both.counted(both.backward(keeping.weight, limits).edges(keeping.held, ledger))
    while True:
        tried = Ledger()
        backward = shortest(problem, "backward", edges, keeping, tried)
        if backward is None:
            return None
        joint = _forced(backward)
        found = ForwardCandidates(problem, prices, _demands(in_running_order(backward)), joint, tried).edges()
        impossible = next((e for e in joint if not _is_among(e, found)), None)
        if impossible is None:
            break
        ledger.refuse("joint", impossible.start, impossible.stop, impossible.name, _why_impossible(impossible, joint))
        edges = [e for e in edges if e.fusion is not impossible.fusion or e.whole != impossible.whole]
    forward = shortest(problem, "forward", found, keeping, tried)
    ledger.add(tried)
    return None if forward is None else Covers(forward, backward, list(ledger.refusals))


def _forced(backward: list[Edge]) -> list[Edge]:
    """The joint fusions of a backward cover, over what their forward covers."""
    found = []
    for edge in backward:
        if edge.is_joint:
            assert edge.fusion is not None and edge.whole is not None
            start, stop = edge.fusion.covers("forward", *edge.whole)
            found.append(replace(edge, start=start, stop=stop))
    return found


def _is_among(joint: Edge, edges: list[Edge]) -> bool:
    return any(e.fusion is joint.fusion and e.whole == joint.whole for e in edges)


def _why_impossible(edge: Edge, joint: list[Edge]) -> str:
    """Why a joint fusion of a backward cover cannot run forward."""
    others = [e.name for e in joint if e is not edge and e.start < edge.stop and edge.start < e.stop]
    if others:
        return f"its forward overlaps that of {', '.join(others)}"
    return "other steps of backward read what its forward does not give"


def _second_round(problem: Problem, prices: Prices, both: BothWays, keeping: Keeping) -> Covers | None:
    """Forward as if nobody demanded anything, then a round within what it gives."""
    free = shortest(problem, "forward", both.free, keeping, Ledger())
    return None if free is None else _round(problem, prices, both, keeping, _limits_of(problem, free), Ledger())


def _limits_of(problem: Problem, forward: list[Edge]) -> Withheld:
    """What the fusions of a forward cover do not give."""
    root, limits = problem.graph.root, Withheld()
    for edge in forward:
        if edge.fusion is None:
            continue
        nodes = problem.nodes[edge.start : edge.stop]
        inside = {root(v) for n in nodes for v in (n.output, *n.named_out)}
        last = root(nodes[-1].output)
        given = {ref.index for ref in problem.emitted(edge.fusion, nodes).values()}
        limits.forbidden |= inside - {last} - given
        limits.given |= given | {last}
        limits.silent |= {n.index for n in nodes}
    return limits


def _demands(steps: Iterable[Step]) -> set[Ref]:
    """What backward steps read of forward's."""
    made: set[Ref] = set()
    demanded: set[Ref] = set()
    for step in steps:
        demanded |= {r for r in step.reads() if r not in made}
        made |= set(step.writes())
    return {r for r in demanded if r.kind in (VALUE, STATISTIC, EMITTED, SAVED)}

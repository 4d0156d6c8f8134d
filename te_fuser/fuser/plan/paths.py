"""Shortest paths over candidates, and why the others lost."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import networkx as nx

from te_fuser.fuser.plan.candidates import TICK, Edge, Ledger

if TYPE_CHECKING:
    from te_fuser.fuser.plan.keeping import Keeping
    from te_fuser.fuser.plan.problem import Problem

_TIE = 0.05e-6  # seconds: shown as nothing


def shortest(
    problem: Problem, direction: str, edges: list[Edge], keeping: Keeping, ledger: Ledger
) -> list[Edge] | None:
    """The cheapest way from the first op to the last; None when there is none. Fusions that lost are noted."""
    best: dict[tuple[int, int], Edge] = {}
    if problem.preferred:  # measured faster, whatever their price
        edges = [replace(e, weight=0.0, ahead=0) if _is_preferred(problem, e) else e for e in edges]
    for edge in edges:
        key = (edge.start, edge.stop)
        if key not in best or edge.compared < best[key].compared:
            best[key] = edge
    graph = nx.DiGraph()
    graph.add_nodes_from((0, len(problem.nodes)))
    graph.add_weighted_edges_from((start, stop, edge.compared) for (start, stop), edge in best.items())
    try:
        path = nx.shortest_path(graph, 0, len(problem.nodes), weight="weight")
    except nx.NetworkXNoPath:
        return None
    chosen = [best[a, b] for a, b in itertools.pairwise(path)]
    taken = {id(e) for e in chosen}
    losers = [e for e in edges if e.fusion is not None and id(e) not in taken]
    if losers:
        weighed = bool(keeping.weight) and direction == "backward"
        for edge, reason in _why_they_lost(losers, chosen, graph, len(problem.nodes), weighed):
            ledger.refuse(direction, edge.start, edge.stop, edge.name, reason)
    return chosen


def _is_preferred(problem: Problem, edge: Edge) -> bool:
    return edge.fusion is not None and (edge.fusion.name, edge.start, edge.stop) in problem.preferred


def _why_they_lost(
    losers: list[Edge], chosen: list[Edge], graph: nx.DiGraph, end: int, weighed: bool
) -> Iterable[tuple[Edge, str]]:
    """Say of each what the best cover with it in it would cost more than the chosen one."""
    edges = list(graph.edges(data="weight"))
    before, after = distances(edges), distances_to(end, edges)
    for edge in losers:
        rivals = [c for c in chosen if c.start < edge.stop and edge.start < c.stop]
        names = " + ".join(dict.fromkeys(c.name for c in rivals))
        if edge.start not in before or edge.stop not in after:
            yield edge, f"no other steps fit around it; {names} is taken"
            continue
        more = (before[edge.start] + edge.compared + after[edge.stop] - before[end]) * TICK
        if more < _TIE:
            yield edge, f"no gain over {names}"
            continue
        note = ", with what is kept for backward weighed in" if weighed else ""
        note += ", both directions together" if any(e.is_joint for e in (edge, *rivals)) else ""
        yield edge, f"predicted {more * 1e6:.1f} us more than {names}{note}"


def distances(edges: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Place -> the length of the shortest way there from 0 over (from, to, length), all of which lead on."""
    found = {0: 0}
    for start, stop, length in sorted(edges):
        if start in found:
            found[stop] = min(found.get(stop, found[start] + length), found[start] + length)
    return found


def distances_to(end: int, edges: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Place -> the length of the shortest way from there to `end`."""
    turned = [(end - stop, end - start, length) for start, stop, length in edges]
    return {end - place: length for place, length in distances(turned).items()}

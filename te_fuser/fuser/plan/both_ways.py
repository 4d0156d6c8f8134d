"""What joint fusions cost in both directions: backward's cover chooses them, and forward's then has to follow."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from te_fuser.fuser.plan.backward_candidates import BackwardCandidates
from te_fuser.fuser.plan.candidates import Edge, Ledger, Withheld
from te_fuser.fuser.plan.forward_candidates import ForwardCandidates
from te_fuser.fuser.plan.paths import distances, distances_to

if TYPE_CHECKING:
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem


class BothWays:
    """Forward's share of backward's candidates, so that covers of backward compare what both directions take.

    Forward is priced as if backward demanded nothing of it. A candidate stands for forward's way past its ops without
    joint fusions; a joint fusion, on top, for what the whole way takes longer (or less long) through its forward.
    """

    def __init__(self, problem: Problem, prices: Prices) -> None:
        self.problem, self.prices = problem, prices
        self.candidates = ForwardCandidates(problem, prices, set(), [], Ledger())
        self.end = len(problem.nodes)
        self._backward: dict[Any, BackwardCandidates] = {}

    def backward(self, weight: float, limits: Withheld) -> BackwardCandidates:
        """Backward's candidates, made once for all plans that differ in nothing but the values that they keep."""
        key = weight, *map(frozenset, (limits.forbidden, limits.given, limits.silent))
        if key not in self._backward:
            self._backward[key] = BackwardCandidates(self.problem, self.prices, weight, limits)
        return self._backward[key]

    def counted(self, backward: list[Edge]) -> list[Edge]:
        """The candidates with forward's share; without joint fusions among them forward is the same for all covers."""
        return [replace(e, ahead=self._share(e)) for e in backward] if any(e.is_joint for e in backward) else backward

    def _share(self, edge: Edge) -> int:
        passing = self._way_to[edge.stop] - self._way_to[edge.start]
        return passing + (self._more(edge) if edge.is_joint else 0)

    def _more(self, edge: Edge) -> int:
        """What all of forward takes more with the forward of a joint fusion in it; 0 where that cannot run at all."""
        forward = self.candidates.forward_of(edge)
        before, after = self._distances
        if forward is None or forward.start not in before or forward.stop not in after:
            return 0  # why, is said where forward is covered
        return before[forward.start] + forward.length + after[forward.stop] - before[self.end]

    @functools.cached_property
    def free(self) -> list[Edge]:
        """The candidates of a forward of which backward demands nothing."""
        return self.candidates.edges()

    @functools.cached_property
    def _distances(self) -> tuple[dict[int, int], dict[int, int]]:
        """Ticks of the shortest way from the first op to each place, and from there to the end."""
        edges = [(e.start, e.stop, e.length) for e in self.free]
        return distances(edges), distances_to(self.end, edges)

    @functools.cached_property
    def _way_to(self) -> list[int]:
        """For each place the ticks of forward before it; never less for a later one."""
        before = self._distances[0]
        least = [before[self.end]]
        for place in range(self.end - 1, -1, -1):
            least.append(min(least[-1], before.get(place, least[-1])))
        return least[::-1]

"""The planner: which steps cover the list, in each direction, and what is kept in between.

Backward is covered first: that says which values it reads. Then forward, which must emit them. docs/design.md says
which module does what.
"""

from __future__ import annotations

from te_fuser.fuser.both_ways import BothWays
from te_fuser.fuser.covers import cover
from te_fuser.fuser.finish import finish
from te_fuser.fuser.graph import Graph
from te_fuser.fuser.keeping import LAMBDA, Keeping, plan_for_memory
from te_fuser.fuser.plan import Plan
from te_fuser.fuser.prices import Prices
from te_fuser.fuser.problem import Options, Problem, find_matches


class Planner:
    """Plans one graph."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.problem = Problem(graph, options)
        self.prices = Prices(self.problem)
        self.both = BothWays(self.problem, self.prices)

    def plan(self) -> Plan:
        """Both plans, for the memory that was asked for."""
        return plan_for_memory(self.problem.options.memory, self._weighed)

    def _weighed(self, keeping: Keeping) -> Plan:
        return finish(self.problem, self.prices, cover(self.problem, self.prices, self.both, keeping))


__all__ = ["LAMBDA", "Options", "Planner", "find_matches"]

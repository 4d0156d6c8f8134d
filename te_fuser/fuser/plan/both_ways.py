"""What joint fusions cost in both directions: backward's cover chooses them, and forward's then has to follow.

Forward is priced as if backward demanded nothing of it. A candidate for backward stands for forward's way past its ops
without joint fusions; a joint fusion, on top, for what the whole way takes longer (or less long) through its forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from te_fuser.fuser.plan.paths import distances, distances_to

if TYPE_CHECKING:
    from te_fuser.fuser.plan.candidates import Edge, Found


class Passing:
    """Forward's ways past the ops of a section; places are counted from its beginning.

    Args:
        free: the candidates of a forward of which backward demands nothing.
        length: their lengths in ticks.
    """

    def __init__(self, free: Found, length: Callable[[Edge], int]) -> None:
        section = free.section
        edges = [(e.start - section.start, e.stop - section.start, length(e)) for e in free.edges]
        self._end = section.stop - section.start
        self._before, self._after = distances(edges), distances_to(self._end, edges)
        least = [self._before[self._end]]
        for place in range(self._end - 1, -1, -1):
            least.append(min(least[-1], self._before.get(place, least[-1])))
        self._way_to = least[::-1]  # never less for a later place

    def past(self, start: int, stop: int) -> int:
        """Ticks of forward for the ops start..stop-1."""
        return self._way_to[stop] - self._way_to[start]

    def more(self, start: int, stop: int, length: int) -> int:
        """What all of forward takes more with a candidate in it; 0 where that cannot be at all."""
        if start not in self._before or stop not in self._after:
            return 0  # why, is said where forward is covered
        return self._before[start] + length + self._after[stop] - self._before[self._end]

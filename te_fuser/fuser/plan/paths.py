"""Ways through a section: the cheapest steps for its ops in one direction, as a shortest path over candidates."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import EMITTED, SAVED, STATISTIC, VALUE
from te_fuser.fuser.plan.candidates import TICK, Edge
from te_fuser.fuser.plan.plan import Choice
from te_fuser.fuser.plan.prices import NOTHING
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.plan.candidates import Found, MatchOf
    from te_fuser.fuser.plan.prices import CostModel
    from te_fuser.fuser.plan.sections import Section
    from te_fuser.fuser.steps.step import Step

_TIE = 0.05e-6  # seconds: shown as nothing


@dataclass(frozen=True, eq=False)
class Aim:
    """Objective that ways minimize: seconds, and bytes kept for backward, each worth `weight` passes over it.

    Attributes:
        share: of the host's seconds beside a device's, how many a second of the host weighs: what is to be the least is
            the larger of two sums, and no shortest path sees that. On a CPU, which is its own host, they are added up.
    """

    prices: CostModel
    weight: float
    share: float

    def takes(self, edge: Edge) -> float:
        """Seconds of an edge's steps, with the host's by its share."""
        device, host = edge.takes
        return device + self.share * host

    def seconds(self, edge: Edge) -> float:
        """Seconds of an edge's steps, with what the bytes that it makes kept are worth."""
        device, host = edge.takes
        return device + self.share * host + edge.kept * self.weight / self.prices.bandwidth

    def in_forward(self, edge: Edge) -> float:
        """Seconds that forward takes for what an edge of backward makes kept."""
        device, host = edge.in_forward
        return device + self.share * host

    def length(self, edge: Edge) -> int:
        """`seconds` in ticks; a tie goes to the registered fusion, then to the earlier candidate."""
        return max(10 * round(self.seconds(edge) / (10 * TICK)) + (0 if edge.fusion else 1), 0)


@record(eq=False)
class Way:
    """The cheapest way through a section; `compared`: ticks with forward's share, by candidate."""

    found: Found
    edges: tuple[Edge, ...]
    length: int
    compared: Mapping[Edge, int]
    choices: list[Choice]

    def matches_in(self, there: Section) -> list[MatchOf]:
        """The fusions that it takes, where they match in a section that is like its own."""
        by = there.start - self.found.section.start
        return [(fusion, (start + by, stop + by)) for fusion, (start, stop) in self._matches]

    @functools.cached_property
    def _matches(self) -> list[MatchOf]:
        return [match for e in self.edges if (match := e.match) is not None]

    @functools.cached_property
    def recomputed(self) -> frozenset[Ref]:
        return frozenset(r for e in self.edges for r in e.recomputes)

    @functools.cached_property
    def read(self) -> frozenset[Ref]:
        """Tensors of forward that its steps on the chain of backward read."""
        return self._read_by(lambda step: not step.hangs)

    @functools.cached_property
    def read_hanging(self) -> frozenset[Ref]:
        """Tensors of forward that its hanging steps read."""
        return self._read_by(lambda step: step.hangs)

    def _read_by(self, which: Callable[[Step], bool]) -> frozenset[Ref]:
        kinds = (VALUE, STATISTIC, EMITTED, SAVED)
        return frozenset(r for e in self.edges for s in e.steps if which(s) for _, r in s.inputs if r.kind in kinds)


def way_through(
    aim: Aim,
    found: Found,
    held: Set[int] = frozenset(),
    dropped: Set[MatchOf] = frozenset(),
    ahead: Callable[[Edge], int] | None = None,
) -> Way | None:
    """The cheapest way through a section, which counts values and matches from its beginning; None where there is none.

    Args:
        held: values that are kept in any case.
        dropped: fusions that are no candidates any more.
        ahead: ticks of forward that a candidate for backward stands for.
    """
    variants = {picked: edges for edges, picked in _picked(aim, found, held)}
    others = [e for e in found.others if not (dropped and e.match and found.section.of_matches([e.match]) <= dropped)]
    edges = [*variants, *others]
    preferred = aim.prices.problem.preferred  # measured to be faster there, whatever the price
    free = [e for e in edges if e.fusion is None or (e.fusion.name, e.start, e.stop) not in preferred]
    lengths = dict.fromkeys(edges, 0) | {e: aim.length(e) for e in free}
    compared = lengths
    if owing := [e for e in free if e.in_forward is not NOTHING]:
        compared = lengths | {e: lengths[e] + 10 * round(aim.in_forward(e) / (10 * TICK)) for e in owing}
    if ahead is not None:
        compared = compared | {e: max(compared[e] + ahead(e), 0) for e in free}
    path = _shortest(found.section.start, found.section.stop, compared)
    if path is None:
        return None
    choices = [c for edge in path if edge in variants for c in _choices(aim, edge, variants[edge])]
    return Way(found, tuple(path), sum(lengths[e] for e in path), compared, choices)


def _picked(aim: Aim, found: Found, held: Set[int]) -> Iterator[tuple[list[Edge], Edge]]:
    """The variants of each row kernel, and the best of those that keep what is held."""
    graph, number = aim.prices.graph, found.section.numbers

    def pick(edges: list[Edge]) -> Edge | None:
        allowed = [e for e in edges if not (held and any(number[graph.value_of(r)] in held for r in e.recomputes))]
        if len(allowed) < 2:
            return next(iter(allowed), None)
        return min(allowed, key=lambda e: aim.seconds(e) + aim.in_forward(e))

    for rows, lone in zip(found.rows, found.lone, strict=True):
        picked = [(edges, pick(edges)) for edges in rows]
        if any(best is None for _, best in picked):
            picked += [(edges, pick(edges)) for edges in lone]
        yield from ((edges, best) for edges, best in picked if best is not None)


def _choices(aim: Aim, best: Edge, variants: list[Edge]) -> Iterator[Choice]:
    """Choices for the values that a kernel computes again, or could, each with what the other would take."""
    prices, graph = aim.prices, aim.prices.graph
    made = {frozenset(e.recomputes): e for e in variants}
    chosen = frozenset(best.recomputes)
    for ref in prices.problem.recomputable(best.start, best.stop):
        other = made.get(chosen ^ {ref})
        if other is not None:
            again = ref in chosen
            more = aim.takes(best) - aim.takes(other) + aim.in_forward(best) - aim.in_forward(other)
            yield Choice(ref.label(graph), again, prices.size(ref), more if again else -more, graph.value_of(ref))


def _shortest(start: int, end: int, lengths: Mapping[Edge, int]) -> list[Edge] | None:
    """The edges of the shortest way; a tie goes to the last edge that begins earlier."""
    best: dict[int, tuple[int, list[Edge]]] = {start: (0, [])}
    for edge in sorted(lengths, key=operator.attrgetter("start")):
        if edge.start in best:
            so_far, edges = best[edge.start]
            length = so_far + lengths[edge]
            if edge.stop not in best or length < best[edge.stop][0]:
                best[edge.stop] = length, [*edges, edge]
    return best[end][1] if end in best else None


def why_not_taken(way: Way, note: str) -> Iterable[tuple[Edge, str]]:
    """Reasons for which fusions lost: how much more the best way with each would take."""
    taken, section = {*way.edges}, way.found.section
    losers = [e for e in way.compared if e.fusion is not None and e not in taken]
    if not losers:
        return
    edges = [(e.start - section.start, e.stop - section.start, length) for e, length in way.compared.items()]
    end = section.stop - section.start
    before, after = _distances(edges), _distances_to(end, edges)
    for edge in losers:
        rivals = [c for c in way.edges if c.start < edge.stop and edge.start < c.stop]
        names = " + ".join(dict.fromkeys(c.name for c in rivals))
        start, stop = edge.start - section.start, edge.stop - section.start
        if start not in before or stop not in after:
            yield edge, f"no other steps fit around it; {names} is taken"
            continue
        more = (before[start] + way.compared[edge] + after[stop] - before[end]) * TICK
        if more < _TIE:
            yield edge, f"no gain over {names}"
            continue
        both = ", both directions together" if any(e.is_joint for e in (edge, *rivals)) else ""
        yield edge, f"predicted {more * 1e6:.1f} us more than {names}{note}{both}"


class Passing:
    """Ticks of forward that candidates for backward stand for, where joint fusions are among them.

    Backward's cover chooses these, and forward's has to follow. Forward is priced as if backward demanded nothing: a
    candidate stands for forward's way past its ops without joint fusions; a joint fusion, on top, for what the whole
    way takes longer (or less long) through its forward. Places are counted from the section's beginning.
    """

    def __init__(self, free: Found, length: Callable[[Edge], int]) -> None:
        section = free.section
        edges = [(e.start - section.start, e.stop - section.start, length(e)) for e in free.edges]
        self._end = section.stop - section.start
        self._before, self._after = _distances(edges), _distances_to(self._end, edges)
        least = [self._before[self._end]]
        for place in range(self._end - 1, -1, -1):
            least.append(min(least[-1], self._before.get(place, least[-1])))
        self._way_to = least[::-1]  # never less for a later place

    def past(self, start: int, stop: int) -> int:
        """Ticks of forward for the ops start..stop-1."""
        return self._way_to[stop] - self._way_to[start]

    def more(self, start: int, stop: int, length: int) -> int:
        """Ticks that all of forward takes more with a candidate in it; 0 where the candidate fits nowhere."""
        if start not in self._before or stop not in self._after:
            return 0  # why, is said where forward is covered
        return self._before[start] + length + self._after[stop] - self._before[self._end]


def _distances(edges: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Place -> the length of the shortest way there from 0 over (from, to, length)."""
    found = {0: 0}
    for start, stop, length in sorted(edges):
        if start in found:
            found[stop] = min(found.get(stop, found[start] + length), found[start] + length)
    return found


def _distances_to(end: int, edges: Iterable[tuple[int, int, int]]) -> dict[int, int]:
    """Place -> the length of the shortest way from there to `end`."""
    turned = [(end - stop, end - start, length) for start, stop, length in edges]
    return {end - place: length for place, length in _distances(turned).items()}

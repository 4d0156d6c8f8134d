"""Covers: the cheapest steps for the whole list in each direction, and how the two meet.

Backward is covered first, by what both directions take (`paths.Passing`), then the forward that gives what it reads.
If that cost forward a fusion, a second round plans backward around a free forward; the cheaper total wins. Ways are
found once for all sections that are alike, in the first of them. docs/lab/covers.md has more.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from te_fuser.fuser.plan.backward_candidates import BackwardCandidates
from te_fuser.fuser.plan.candidates import TICK, Placed, Withheld
from te_fuser.fuser.plan.forward_candidates import ForwardCandidates
from te_fuser.fuser.plan.paths import Aim, Passing, Way, way_through, why_not_taken
from te_fuser.fuser.plan.plan import Choice, Refusal

if TYPE_CHECKING:
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.plan.candidates import Edge, Found, MatchOf
    from te_fuser.fuser.plan.planner import Keeping
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.plan.sections import Section

Candidates = Union[BackwardCandidates, ForwardCandidates]  # noqa: UP007 - a type alias at run time
_WEIGHED = ", with what is kept for backward weighed in"


@dataclass(frozen=True)
class Covers:
    """Placed candidates that cover the list; choices of what is computed again; what was not taken."""

    forward: list[Placed]
    backward: list[Placed]
    choices: list[Choice]
    refusals: Callable[[], list[Refusal]]


@dataclass(frozen=True)
class _Round:
    """Ways through all sections that fit together.

    Attributes:
        impossible: joint fusions that backward would have taken, and why their forward cannot run.
        again, read: what backward computes again, which hanging nodes then read, and what it reads of forward's.
    """

    backward: list[Way]
    forward: list[Way]
    impossible: dict[MatchOf, Refusal]
    again: Set[Ref]
    read: Set[Ref]

    @property
    def length(self) -> int:
        return sum([way.length for way in (*self.forward, *self.backward)])

    @property
    def demand_unmet(self) -> bool:
        """True where another backward could let forward take more fusions."""
        return True in [way.found.demand_unmet for way in self.forward]


class Covering:
    """The covers of one problem."""

    def __init__(self, prices: Prices) -> None:
        self.prices, self.problem = prices, (problem := prices.problem)
        self.sections, self._free = problem.sections, ForwardCandidates(prices)
        self._rank = {name: k for k, name in enumerate(dict.fromkeys(f.name for f, _, _ in problem.matches))}
        self._known: dict[Hashable, Any] = {}

    def cover(self, keeping: Keeping, share: float) -> Covers:
        """The cheapest covers that fit together, where so much of the host's time is weighed."""
        aim = self._once((share, keeping.weight), lambda: Aim(self.prices, keeping.weight, share))
        held, value_of = keeping.held, self.problem.graph.value_of
        found = self._round(aim, held, Withheld())
        assert found is not None  # every op has an edge of its own, and nothing is forbidden
        # Values that are computed again although other steps read their memory, under whatever name, are kept anyway.
        while more := {*map(value_of, found.again & (found.read | self._viewed(found)))} - held:
            held |= more
            found = self._round(aim, held, Withheld())
            assert found is not None
        other = self._second_round(aim, held) if found.demand_unmet else None
        if other is not None and other.length < found.length:
            found, other = other, None
        backward, forward = self._laid_out(found.backward), self._laid_out(found.forward)
        refusals = functools.partial(self._refusals, aim, found, other)
        return Covers(forward, backward, self._choices(found), refusals)

    def _viewed(self, found: _Round) -> set[Ref]:
        views = self.problem.graph.views
        return {views[ref] for ref in views.keys() & found.read}

    # --------------------------------------------------------------------------------------------- rounds

    def _round(self, aim: Aim, held: frozenset[int], limits: Withheld) -> _Round | None:
        """Backward, then the forward that gives what it reads; None where no candidate is left."""
        candidates, impossible = BackwardCandidates(self.prices, limits), dict[Any, Refusal]()
        known = self._all_found(limits, candidates)
        while True:
            backward = self._backward(aim, held, impossible, known)
            if backward is None:
                return None
            chosen = _edges(backward)
            follows = functools.partial(self._following, backward)
            joint, found, wrong, reads = self._once(("following", chosen), follows)
            if wrong is None:
                break
            impossible[wrong] = _why_impossible(wrong, joint)
        forward = self._forward(aim, found)
        if forward is None:
            return None
        return _Round(backward, forward, impossible, *reads)

    def _following(
        self, backward: list[Way]
    ) -> tuple[list[MatchOf], list[Found], MatchOf | None, tuple[set[Ref], frozenset[Ref]]]:
        """A backward cover's joint fusions, forward's candidates, the first that cannot run, what is read."""
        joint = [match for match in self._matches(backward) if match[0].direction == "joint"]
        reads = self._reads(backward)
        candidates = ForwardCandidates(self.prices, reads[1], joint)
        found = self._all_found((reads[1], *joint), candidates)
        return joint, found, self._cannot_run(joint, found), reads

    def _second_round(self, aim: Aim, held: frozenset[int]) -> _Round | None:
        """Forward as if nobody demanded anything, then a round within what it gives."""
        free = self._forward(aim, self._all_found((), self._free))
        if free is None:
            return None
        limits = self._once((Withheld, *_edges(free)), lambda: _limits_of(self.problem, self._matches(free)))
        return self._round(aim, held, limits)

    def _matches(self, ways: list[Way]) -> list[MatchOf]:
        return [m for way, section in zip(ways, self.sections, strict=True) for m in way.matches_in(section)]

    def _cannot_run(self, joint: Sequence[MatchOf], forward: Sequence[Found]) -> MatchOf | None:
        """The first joint fusion of a backward cover whose forward cannot run."""
        starts = [section.start for section in self.sections]
        for fusion, (start, stop) in joint:
            number = bisect.bisect_right(starts, start) - 1
            found = forward[number]
            by = starts[number] - found.section.start
            if (fusion, (start - by, stop - by)) not in [e.match for e in found.others]:
                return fusion, (start, stop)
        return None

    def _reads(self, backward: list[Way]) -> tuple[set[Ref], frozenset[Ref]]:
        """Tensors that backward computes again, and those of forward that it reads."""
        again: set[Ref] = set()
        read: set[Ref] = set()
        hanging: set[Ref] = set()
        for way, section in zip(backward, self.sections, strict=True):
            there_is = way.found.section.refs_in(section)
            for refs, found in ((way.recomputed, again), (way.read, read), (way.read_hanging, hanging)):
                found.update(map(there_is.__getitem__, refs))
        return again, frozenset(read | hanging - again)

    # --------------------------------------------------------------------------- sections that are alike

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]

    def _found(self, candidates: Candidates, section: Section) -> Found:
        key = type(candidates), section.form, *candidates.seen_from(section)
        if key not in self._known:
            self._known[key] = candidates.edges(section)
        return self._known[key]  # type: ignore[no-any-return]

    def _all_found(self, key: Hashable, candidates: Candidates) -> list[Found]:
        return self._once(  # type: ignore[no-any-return]
            (type(candidates), key), lambda: [self._found(candidates, section) for section in self.sections]
        )

    def _forward(self, aim: Aim, found: list[Found]) -> list[Way] | None:
        ways = {f: self._once((f, aim), functools.partial(way_through, aim, f)) for f in dict.fromkeys(found)}
        return _all([ways[f] for f in found])

    def _backward(
        self, aim: Aim, held: frozenset[int], dropped: Collection[MatchOf], found: list[Found]
    ) -> list[Way] | None:
        def limits(section: Section) -> tuple[frozenset[int], frozenset[MatchOf]]:
            return section.of_values(held), section.of_matches(dropped)

        free: tuple[frozenset[int], frozenset[MatchOf]] = frozenset(), frozenset()
        limited = bool(held or dropped)
        asked = [(f, limits(s) if limited else free) for f, s in zip(found, self.sections, strict=True)]

        def way(f: Found, kept: frozenset[int], none: frozenset[MatchOf]) -> Way | None:
            make = functools.partial(way_through, aim, f, kept, none, self._ahead(aim, f))
            return self._once((f, aim, kept, none), make)  # type: ignore[no-any-return]

        ways = {(f, limit): way(f, *limit) for f, limit in dict.fromkeys(asked)}
        return _all([ways[a] for a in asked])

    def _ahead(self, aim: Aim, backward: Found) -> Callable[[Edge], int] | None:
        """Forward ticks by backward candidate, as a function; None without joint fusions."""
        if not any(e.is_joint for e in backward.others):
            return None
        here, free = backward.section.start, self._found(self._free, backward.section)
        passing: Passing = self._once((Passing, free, aim), lambda: Passing(free, aim.length))

        def ahead(edge: Edge) -> int:
            found = passing.past(edge.start - here, edge.stop - here)
            if not edge.is_joint:
                return found
            forward = self._once((edge, "forward"), lambda: self._free.forward_of(edge, backward.section))
            if forward is not None:
                found += passing.more(forward.start - here, forward.stop - here, aim.length(forward))
            return found

        return ahead

    def _laid_out(self, ways: Sequence[Way]) -> list[Placed]:
        placed = zip(self.sections, ways, strict=True)
        return [Placed(w.edges, (here := w.found.section), s, s.start - here.start) for s, w in placed]

    # ---------------------------------------------------------------------------------- what is said of it

    def _choices(self, found: _Round) -> list[Choice]:
        """The choices of all sections; where backward reads a view, the memory stays anyway."""
        choices, viewed = list[Choice](), self._viewed(found)
        for section, way in zip(self.sections, found.backward, strict=True):
            if way.choices:
                choices += self._once((Choice, way, section), functools.partial(self._choices_in, way, section))
        return [c for c in choices if self.problem.read_in_backward(c.root) not in viewed] if viewed else choices

    def _choices_in(self, way: Way, there: Section) -> list[Choice]:
        here, values = way.found.section, self.problem.graph.values
        there_is = [(choice, there.values[here.numbers[choice.root]]) for choice in way.choices]
        return [Choice(values[root].name, c.recomputed, c.bytes, c.seconds, root) for c, root in there_is]

    def _refusals(self, aim: Aim, found: _Round, other: _Round | None) -> list[Refusal]:
        """Refusals of backward, then of forward, non-candidates before losers."""
        note = _WEIGHED if aim.weight else ""
        said = self._in_order(found.backward, lambda way: way.found.refusals)
        said += found.impossible.values()
        said += self._in_order(found.backward, lambda way: self._lost("backward", way, note))
        cost = self._costs_of_unmet(aim, found, other, note) if found.demand_unmet else {}
        unmet = self._in_order(found.forward, lambda way: way.found.refusals)
        said += [r._replace(reason=r.reason + cost.get((r.name, r.start, r.stop), "")) for r in unmet]
        said += self._in_order(found.forward, lambda way: self._lost("forward", way, ""))
        return list(dict.fromkeys(said))

    def _costs_of_unmet(
        self, aim: Aim, found: _Round, other: _Round | None, note: str
    ) -> dict[tuple[str, int, int], str]:
        """Costs of forward fusions that do not give what backward reads."""
        free = self._forward(aim, self._all_found((), self._free)) or []
        lost = self._in_order(free, lambda way: self._lost("forward", way, ""))
        costs = {(r.name, r.start, r.stop): f"; in forward alone: {r.reason}" for r in lost}
        if other is not None:
            more = f"{(other.length - found.length) * TICK * 1e6:.1f} us longer{note}"
            for fusion, whole in self._matches(other.forward):
                there = (fusion.name, *fusion.covers("forward", *whole))
                costs[there] = f"; a plan whose backward does without that is predicted {more}"
        return costs

    def _lost(self, direction: str, way: Way, note: str) -> list[Refusal]:
        def make() -> list[Refusal]:
            return [Refusal(direction, e.start, e.stop, e.name, why) for e, why in why_not_taken(way, note)]

        return self._once((why_not_taken, way), make)  # type: ignore[no-any-return]

    def _in_order(self, ways: list[Way], refusals: Callable[[Way], Iterable[Refusal]]) -> list[Refusal]:
        """Refusals of all sections, in the order of their fusions."""
        found = []
        for section, way in zip(self.sections, ways, strict=True):
            by = section.start - way.found.section.start
            found += [Refusal(r.direction, r.start + by, r.stop + by, r.name, r.reason) for r in refusals(way)]
        return sorted(found, key=lambda r: self._rank.get(r.name, -1))


def _all(ways: list[Way | None]) -> list[Way] | None:
    return None if None in ways else ways  # type: ignore[return-value]


def _edges(ways: Sequence[Way]) -> tuple[Edge, ...]:
    return tuple([e for way in ways for e in way.edges])


def _why_impossible(match: MatchOf, joint: Sequence[MatchOf]) -> Refusal:
    """Refusal, with its reason, of a joint fusion of a backward cover whose forward cannot run."""
    (fusion, whole), reason = match, "other steps of backward read what its forward does not give"
    start, stop = fusion.covers("forward", *whole)
    places = [(f.name, *f.covers("forward", *w)) for f, w in joint if (f, w) != match]
    others = [name for name, a, b in places if a < stop and start < b]
    if others:
        reason = f"its forward overlaps that of {', '.join(others)}"
    return Refusal("joint", start, stop, fusion.name, reason)


def _limits_of(problem: Problem, forward: Iterable[MatchOf]) -> Withheld:
    """Limits on backward: what the fusions of a forward cover do not give."""
    root, forbidden, given, silent = problem.graph.roots.__getitem__, set[int](), set[int](), set[int]()
    for fusion, whole in forward:
        nodes = problem.nodes[slice(*fusion.covers("forward", *whole))]
        inside = {root(v) for n in nodes for v in (n.output, *n.named_out)}
        last = root(nodes[-1].output)
        emitted = {ref.index for ref in problem.emitted(fusion, nodes).values()}
        forbidden |= inside - {last} - emitted
        given |= emitted | {last}
        silent |= {n.index for n in nodes}
    return Withheld(frozenset(forbidden), frozenset(given), frozenset(silent))

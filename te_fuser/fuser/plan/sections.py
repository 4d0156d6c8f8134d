"""Sections: runs of ops that no candidate leaves. Covers are found in each by itself, and once for all that are alike.

Two sections are alike where everything that a candidate, its price and its reasons depend on is equal, counted from
the section's beginning. Conditions of fusions may ask more than that, so they are asked in every place.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Collection, Hashable, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.checks import plain
from te_fuser.fuser.graph.refs import Ref

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.candidates import MatchOf
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fusions.registry import Fusion


@dataclass(frozen=True, eq=False)
class Section:
    """The ops start..stop-1 with all that their candidates know of.

    Attributes:
        form: a number; equal for sections that are alike.
        values, parameters: of the graph, in an order that sections which are alike share.
        matches: where fusions fit in it.
        stretches: those of the problem that lie in it, by number.
    """

    start: int
    stop: int
    form: int
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    matches: tuple[tuple[Fusion, int, int], ...]
    stretches: tuple[int, ...]

    @functools.cached_property
    def numbers(self) -> dict[int, int]:
        """Value -> its number here."""
        return {v: k for k, v in enumerate(self.values)}

    def has(self, node: int) -> bool:
        """Whether an op is in it."""
        return self.start <= node < self.stop

    def of_values(self, values: Set[int]) -> frozenset[int]:
        """Those of some values that are known here, by their numbers."""
        return frozenset([k for k, v in enumerate(self.values) if v in values]) if values else frozenset()

    def of_nodes(self, nodes: Set[int]) -> frozenset[int]:
        """Those of some ops that are here, counted from its beginning."""
        return frozenset([k - self.start for k in range(self.start, self.stop) if k in nodes])

    def of_refs(self, of_values: Mapping[int, list[Ref]], of_nodes: Mapping[int, list[Ref]]) -> frozenset[Ref]:
        """Those of some refs that are known here, with the numbers that they have here.

        Args:
            of_values, of_nodes: by the index, those that count values, and those that count ops.
        """
        nodes = {node: node - self.start for node in range(self.start, self.stop)}
        places = [(refs, self.numbers[v]) for v in of_values.keys() & self.numbers.keys() for refs in of_values[v]]
        places += [(refs, nodes[n]) for n in of_nodes.keys() & nodes.keys() for refs in of_nodes[n]]
        return frozenset([Ref(r.kind, k, r.form, r.name, r.term) for r, k in places])

    def of_matches(self, matches: Iterable[MatchOf]) -> frozenset[MatchOf]:
        """Those of some matches that are here, counted from its beginning."""
        here, end = self.start, self.stop
        return frozenset([(f, (a - here, b - here)) for f, (a, b) in matches if here <= a < end])

    def moved(self, value: int, there: Section) -> int:
        """What a value of this section is in one that is like it."""
        return there.values[self.numbers[value]]

    def refs_in(self, there: Section, refs: Collection[Ref]) -> Collection[Ref]:
        """What some refs of this section are in one that is like it."""
        return refs if there is self else [self.ref_in(there, r) for r in refs]

    def ref_in(self, there: Section, ref: Ref) -> Ref:
        """What a ref of this section is in one that is like it."""
        kind, index, form, name, term = ref
        if kind.counts == "values":
            index = self.moved(index, there)
        elif kind.counts == "parameters":
            index = there.parameters[self.parameters.index(index)]
        elif kind.counts:
            index += there.start - self.start
        return Ref(kind, index, form, name, term)


def sections_of(problem: Problem) -> list[Section]:
    """The sections of a problem, in their order."""
    forms: dict[Hashable, int] = {}
    parts = _between_cuts(problem)
    starts = [start for start, _ in parts]
    matches: list[list[tuple[Fusion, int, int]]] = [[] for _ in parts]
    for match in problem.matches:
        matches[bisect.bisect_right(starts, match[1]) - 1].append(match)
    return [_section(problem, *part, tuple(inside), forms) for part, inside in zip(parts, matches, strict=True)]


def _between_cuts(problem: Problem) -> list[tuple[int, int]]:
    """The shortest runs that no match and no stretch leaves."""
    reach = list(range(1, len(problem.nodes) + 1))
    for start, stop in [*((a, b) for _, a, b in problem.matches), *problem.stretches]:
        reach[start] = max(reach[start], stop)
    found, start, end = [], 0, 0
    for place, stop in enumerate(reach, 1):
        end = max(end, stop)
        if end == place:
            found.append((start, place))
            start = place
    return found


def _section(
    problem: Problem, start: int, stop: int, matches: tuple[tuple[Fusion, int, int], ...], forms: dict[Hashable, int]
) -> Section:
    graph, nodes = problem.graph, problem.nodes[start:stop]
    values = dict.fromkeys(v for n in nodes for v in (n.input, *n.named_in.values(), n.output, *n.named_out))
    values |= dict.fromkeys([r for v in values for r in graph.related[v]])
    parameters = dict.fromkeys(p for n in nodes for p in n.parameters.values())
    first, last = (bisect.bisect_left(problem.stretches, (place,)) for place in (start, stop))
    section = Section(start, stop, -1, tuple(values), tuple(parameters), matches, tuple(range(first, last)))
    form = forms.setdefault(_Form(problem, section).whole(), len(forms))
    return replace(section, form=form)


# ------------------------------------------------------------------------------------------------------- forms


class _Form:
    """Everything that the candidates of a section depend on, by numbers within it."""

    def __init__(self, problem: Problem, section: Section) -> None:
        self.problem, self.section, self.graph = problem, section, problem.graph
        self.nodes = self.graph.nodes[section.start : section.stop]
        self.parameters = {p: k for k, p in enumerate(section.parameters)}

    def whole(self) -> Hashable:
        """The form of the section."""
        start, preferred = self.section.start, self.problem.preferred
        return (
            tuple(map(self._node, self.nodes)),
            tuple((self.graph.parameter_specs[p], self.graph.parameter_needs[p]) for p in self.parameters),
            tuple(map(self._value, self.section.values)),
            tuple((fusion, a - start, b - start) for fusion, a, b in self.section.matches),
            tuple(sorted((name, a - start, b - start) for name, a, b in preferred if self.section.has(a))),
        )

    def _node(self, node: Node) -> Hashable:
        number = self.section.numbers
        return (
            node.likeness,
            number[node.input],
            number[node.output],
            tuple([number[v] for v in node.named_out]),
            tuple([(name, number[v]) for name, v in node.named_in.items()]),
            tuple([(name, self.parameters[p], node.casts.get(name)) for name, p in node.parameters.items()]),
            node.role,
            node.draws,
        )

    def _value(self, value: int) -> Hashable:
        graph, section = self.graph, self.section
        v = graph.values[value]
        producer, readers = graph.producer(value), graph.consumers(value)
        made = producer is not None and (section.has(producer), graph.nodes[producer].is_row)
        start, stop = section.start, section.stop
        return (
            plain(v.name),
            self.problem.asked.values[value].spec.key,
            (v.axes, v.gradient, v.needs_grad),
            tuple([section.numbers.get(r) for r in graph.related[value]]),
            made,
            tuple([k - start if start <= k < stop else None for k in readers]),
            graph.leaves(value),
            self.problem.hanging_reads.get(value),
            self.problem.forms_read[graph.root(value)],
        )

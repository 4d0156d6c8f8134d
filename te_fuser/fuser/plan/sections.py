"""Sections: runs of ops that no candidate leaves. Covers are found in each by itself, and once for all that are alike.

Everything that a candidate, its price and its reasons depend on is equal in these. Conditions of fusions may ask more:
those that may have seen a parameter are asked in every place.
"""

from __future__ import annotations

import bisect
from collections.abc import Collection, Hashable, Mapping, Set
from dataclasses import field
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.checks import plain
from te_fuser.fuser.graph.refs import Ref, gradient_ref
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.plan.candidates import MatchOf
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fusions.registry import Fusion


@record(eq=False)
class Section:
    """The ops start..stop-1 with all that their candidates know of.

    Attributes:
        form: a number; equal for sections that are alike.
        values, parameters: of the graph, in an order that sections which are alike share.
        numbers: value -> its number here.
        matches: where fusions fit in it.
        stretches: those of the problem that lie in it, by number.
    """

    start: int
    stop: int
    form: int
    values: tuple[int, ...]
    parameters: tuple[int, ...]
    numbers: Mapping[int, int]
    matches: tuple[tuple[Fusion, int, int], ...]
    stretches: tuple[int, ...]
    _like: dict[Section, _Moved] = field(default_factory=dict, init=False)

    def has(self, node: int) -> bool:
        return self.start <= node < self.stop

    def of_values(self, values: Set[int]) -> frozenset[int]:
        """Numbers, within the section, of those of `values` that it knows."""
        return frozenset([k for k, v in enumerate(self.values) if v in values]) if values else frozenset()

    def of_nodes(self, nodes: Set[int]) -> frozenset[int]:
        return frozenset([k - self.start for k in range(self.start, self.stop) if k in nodes])

    def of_refs(self, of_values: Mapping[int, list[Ref]], of_nodes: Mapping[int, list[Ref]]) -> frozenset[Hashable]:
        """Keys of the given refs that the section knows, equal for sections where they are alike."""
        found = [(k, v, of_values[v]) for k, v in enumerate(self.values) if v in of_values]
        found += [(n - self.start, n, of_nodes[n]) for n in range(self.start, self.stop) if n in of_nodes]
        return frozenset([(k, r.kind, r.form, r.name, r.term) for k, _, refs in found for r in refs])

    def of_matches(self, matches: Collection[MatchOf]) -> frozenset[MatchOf]:
        """Matches that begin in the section, counted from its beginning."""
        here, end = self.start, self.stop
        return frozenset([(f, (a - here, b - here)) for f, (a, b) in matches if here <= a < end] if matches else ())

    def refs_in(self, there: Section) -> Mapping[Ref, Ref]:
        """Map from each ref of this section to its counterpart in `there`, which is like it."""
        if self not in there._like:
            there._like[self] = _Moved(self, there)
        return there._like[self]


class _Moved(dict[Ref, Ref]):
    """Map from refs of one section to those of another one that is like it, filled as they are asked for."""

    def __init__(self, here: Section, there: Section) -> None:
        self._here, self._there = here, there

    def __missing__(self, ref: Ref) -> Ref:
        kind, index, form, name, term = ref
        here, there = self._here, self._there
        if kind.counts == "values":
            index = there.values[here.numbers[index]]
        elif kind.counts == "parameters":
            index = there.parameters[here.parameters.index(index)]
        elif kind.counts:
            index += there.start - here.start
        self[ref] = found = Ref(kind, index, form, name, term)
        return found


def sections_of(problem: Problem) -> list[Section]:
    """The sections of a problem, in their order."""
    forms: dict[Hashable, int] = {}
    values = _values(problem)
    parts = _between_cuts(problem)
    starts = [start for start, _ in parts]
    matches: list[list[tuple[Fusion, int, int]]] = [[] for _ in parts]
    for match in problem.matches:
        matches[bisect.bisect_right(starts, match[1]) - 1].append(match)
    return [_section(problem, values, *part, tuple(inside), forms) for part, inside in zip(parts, matches, strict=True)]


def _between_cuts(problem: Problem) -> list[tuple[int, int]]:
    """The shortest runs that no match and no stretch leaves."""
    reach = list(range(1, len(problem.nodes) + 1))
    for start, stop in [*[(a, b) for _, a, b in problem.matches], *problem.stretches]:
        reach[start] = max(reach[start], stop)
    found, start, end = [], 0, 0
    for place, stop in enumerate(reach, 1):
        end = max(end, stop)
        if end == place:
            found.append((start, place))
            start = place
    return found


def _values(problem: Problem) -> list[int]:
    """Number of each value, equal where everything is equal that does not depend on the section."""
    graph, known, read = problem.graph, dict[Hashable, int](), problem.transposed
    numbers = []
    for v, asked in zip(graph.values, problem.asked.values, strict=True):
        key = (
            plain(v.name),
            asked.spec.key,
            (v.axes, v.gradient, v.needs_grad),
            v.index in graph.results,
            problem.hanging_reads.get(v.index),
            problem.forms_read[graph.related[v.index][0]],
            bool(read) and graph.ref(v.index).transposed in read,
            bool(read) and gradient_ref(v.index).transposed in read,
        )
        numbers.append(known.setdefault(key, len(known)))
    return numbers


def _section(
    problem: Problem,
    known: list[int],
    start: int,
    stop: int,
    matches: tuple[tuple[Fusion, int, int], ...],
    forms: dict[Hashable, int],
) -> Section:
    graph, nodes = problem.graph, problem.nodes[start:stop]
    values = dict.fromkeys([v for n in nodes for v in (n.input, *n.named_in.values(), n.output, *n.named_out)])
    values |= dict.fromkeys([r for v in values for r in graph.related[v]])
    parameters = dict.fromkeys([p for n in nodes for p in n.parameters.values()])
    numbers, places = {v: k for k, v in enumerate(values)}, {p: k for k, p in enumerate(parameters)}
    preferred = [(name, a - start, b - start) for name, a, b in problem.preferred if start <= a < stop]
    fusions = [(fusion, a - start, b - start) for fusion, a, b in matches]
    whole = (
        tuple([_node_key(node, numbers, places) for node in nodes]),
        tuple([(graph.parameter_specs[p].key, graph.parameter_needs[p]) for p in parameters]),
        tuple([(known[v], _value_key(graph, v, start, stop, numbers)) for v in values]),
        tuple(fusions),
        tuple(sorted(preferred)),
    )
    form = forms.setdefault(whole, len(forms))
    first, last = (bisect.bisect_left(problem.stretches, (place,)) for place in (start, stop))
    return Section(start, stop, form, tuple(values), tuple(parameters), numbers, matches, tuple(range(first, last)))


def _node_key(node: Node, numbers: Mapping[int, int], parameters: Mapping[int, int]) -> Hashable:
    """Key of all that candidates depend on of an op, by numbers within its section."""
    return (
        node.traits.number,
        numbers[node.input],
        numbers[node.output],
        tuple(map(numbers.__getitem__, node.named_out)),
        tuple([(name, numbers[v]) for name, v in node.named_in.items()]),
        tuple([(name, parameters[p], node.casts.get(name)) for name, p in node.parameters.items()]),
        node.traits.role,
        node.traits.draws and node.draw.share,
    )


def _value_key(graph: Graph, value: int, start: int, stop: int, numbers: Mapping[int, int]) -> Hashable:
    """Key of a value, by numbers within its section."""
    producer, readers = graph.makers[value], graph.readers[value]
    made = producer is not None and (start <= producer < stop, graph.nodes[producer].traits.is_row)
    related = tuple(map(numbers.get, graph.related[value]))
    return made, related, tuple([k - start if start <= k < stop else None for k in readers])

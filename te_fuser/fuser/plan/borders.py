"""Where kernels end although one could go on, so that a segment may end there, too.

A product of 8 bits takes them from the kernel before it and hands them to the one behind it, forward as backward, and
no segment ends between these. So a list of such products would be one segment, and engines that sum gradients among
ranks as they come would begin when all are there. Where there are ranks, kernels end at values that both a branch and
what it is added to read, which are stored in any case: once for so many bytes of gradients as make a segment.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from te_fuser.dtypes import FLOAT8
from te_fuser.fuser.graph.refs import bytes_of

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph


def borders(graph: Graph, segment_bytes: int) -> frozenset[int]:
    """The ops before which kernels end; none where no gradient comes in 8 bits.

    Args:
        segment_bytes: of the parameter gradients that make a segment.
    """
    if not any(v.gradient in FLOAT8.values() for v in graph.values):
        return frozenset()
    found, size, counted, places = set(), 0, set[int](), _places(graph)
    for node, following in itertools.pairwise(graph.nodes):
        new = {p for p in node.parameters.values() if graph.parameter_needs[p]} - counted
        counted |= new
        size += sum(bytes_of(graph.parameter_specs[p]) for p in new)
        if size >= segment_bytes and following.index in places:
            found.add(following.index)
            size = 0
    return frozenset(found)


def _places(graph: Graph) -> set[int]:
    """The ops before which one value alone passes: just made by a row op, read by several, as wide as its gradient."""
    readers: dict[int, set[int]] = {}
    for v in graph.values:
        readers.setdefault(graph.root(v.index), set()).update(graph.consumers(v.index))
    leaving = {graph.root(v.index) for v in graph.values if graph.leaves(v.index)}
    changes = [0] * (len(graph.nodes) + 2)  # of how many values pass
    for root, reading in readers.items():
        last = len(graph.nodes) if root in leaving else max(reading, default=-1)
        first = -1 if (made := graph.producer(root)) is None else made
        changes[first + 1] += 1
        changes[max(last, first) + 1] -= 1
    passing = list(itertools.accumulate(changes))
    found = set()
    for node, following in itertools.pairwise(graph.nodes):
        value = graph.values[node.output]
        real = [k for k in readers.get(value.index, ()) if graph.root(graph.nodes[k].output) != value.index]
        alone = passing[following.index] == 1 and value.gradient is None and len(real) > 1
        if node.is_row and following.is_row and alone:
            found.add(following.index)
    return found

"""Schedule of a kernel on a CPU core: its loops over a row, and the values that wait between them in row buffers.

For each row there is one loop over the features for each stage of row reductions, and a last one that stores and adds
to the sums over rows. What several loops need is computed again when that is cheap; else a row buffer keeps it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from te_fuser.codegen.description import KernelDescription
from te_fuser.dtypes import TABLE
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.traversal import topological

_BUFFER_ABOVE = 8  # a value this dear is kept for the next loop instead of being computed again
_UNROLL_BELOW = ((12, 4), (60, 2))  # loop cost, how many accumulators a row reduction gets


@dataclass
class Loop:
    """One pass over the features of a row."""

    reductions: tuple[Expr, ...]
    roots: tuple[Expr, ...]  # everything it computes: arguments of the reductions, parts of stores and sums
    buffered: list[Expr]  # what it keeps for later loops
    last: bool


class CpuSchedule:
    """The loops of one kernel, and what is read by them or is the same for all of them."""

    def __init__(self, description: KernelDescription) -> None:
        self.d = description
        self._load_costs = {load.name: TABLE[load.dtype].reading for load in description.loads}
        self.loops = _loops(description, self.cost)
        self._buffered = {id(e) for loop in self.loops for e in loop.buffered}

    def cost(self, e: Expr) -> int:
        """Cost of a node, in rough instructions for one vector."""
        return self._load_costs[e.attrs[0]] if e.op == "input" else FUNCTIONS[e.op].cpu

    @functools.cached_property
    def is_one_long_row(self) -> bool:
        """True where row boundaries mean nothing; one loop then takes all rows, and no width is an odd one."""
        d = self.d
        simple = all(t.axes == Axes.NONE or (t.axes == Axes.FULL and t.width == d.width) for t in d.tensors)
        return simple and not (d.sums or d.streams or d.reductions or d.transposed)

    @functools.cached_property
    def uses_samples(self) -> bool:
        """True where a row must know the sample to which it belongs."""
        leaves = any(n.op in ("input", "keep") and n.axes & Axes.FULL in (2, 6) for n in self.d.nodes)
        return leaves or any(total.axes & Axes.BATCH for total in self.d.sums)

    @functools.cached_property
    def scalar_roots(self) -> list[Expr]:
        """The values without features that loops, stores and sums read."""
        found = [p for item in self.d.outputs if not item.axes & Axes.FEATURE for p in item.parts]
        for loop in self.loops:
            found += self.scalars_of(loop)
        return found

    def scalars_of(self, loop: Loop) -> list[Expr]:
        """The values without features that a loop reads."""
        kept = {id(e) for e in loop.buffered}
        nodes = _below(loop.roots, lambda e: id(e) in self._buffered and id(e) not in kept)
        lying = {id(n) for n in nodes if id(n) in self._buffered and id(n) not in kept}
        found = [a for n in nodes if id(n) not in lying for a in n.args if not has_features(a)]
        return [*found, *(r for r in loop.roots if not has_features(r))]

    def call_constants(self) -> list[Expr]:
        """Nodes that are the same for all rows of a call, as far as something else reads them."""

        def constant(e: Expr) -> bool:
            return e.axes == Axes.NONE and e.depth == 0 and e.op != "const"

        roots = {id(r) for r in self.scalar_roots}
        nodes = [n for n in topological(self.scalar_roots) if not has_features(n)]
        read = roots | {id(a) for n in nodes if not constant(n) for a in n.args}
        return [n for n in nodes if constant(n) and id(n) in read]

    def drawn_streams(self) -> dict[str, int]:
        """The streams that are drawn for each element -> the width of their rows."""
        return {n.attrs[0]: n.attrs[-1] for n in self.d.nodes if n.op == "keep" and has_features(n)}

    def unroll(self, loop: Loop) -> int:
        """Number of accumulators that the row reductions of a loop get."""
        if not loop.reductions:
            return 1
        cost = sum(self.cost(n) for n in _below(loop.roots, lambda e: id(e) in self._buffered))
        return next((slots for limit, slots in _UNROLL_BELOW if cost <= limit), 1)

    def row_elements(self) -> int:
        """Work on one row, in elements that are read, changed a little and written."""
        moved = sum(t.width for t in self.d.tensors if t.axes == Axes.FULL) / 2
        computed = sum(self.cost(n) for loop in self.loops for n in _below(loop.roots, lambda e: False)) / 8
        return max(1, round(max(moved, computed * self.d.width)))


# ------------------------------------------------------------------------------------------------- nodes


def has_features(e: Expr) -> bool:
    """True where a node has a value for each feature."""
    return bool(e.axes & Axes.FEATURE)


def _below(roots: Iterable[Expr], stop: Callable[[Expr], bool]) -> list[Expr]:
    """The nodes with features below `roots`, arguments first, down to what `stop` holds for."""
    order = topological(roots, lambda e: not has_features(e) or stop(e), stops=True)
    return [e for e in order if has_features(e)]


def _loops(d: KernelDescription, cost: Callable[[Expr], int]) -> list[Loop]:
    feature_roots = [p for item in d.outputs if item.axes & Axes.FEATURE for p in item.parts]
    feature_roots += [p for m in d.maxima for p in m.parts]
    # No loop needs the late reductions: only numbers of a row depend on them, so the last loop can do them.
    read = {id(n) for n in topological(feature_roots)}
    unread = [r for stage in d.reductions for r in stage if id(r) not in read]
    needed = {id(n) for r in unread for n in topological(r.args)}
    late = [r for r in unread if id(r) not in needed]
    loops = []
    for stage in d.reductions:
        early = tuple(r for r in stage if id(r) in read or id(r) in needed)
        if early:
            loops.append(Loop(early, tuple(r.args[0] for r in early), [], last=False))
    if late or feature_roots:
        roots = (*(r.args[0] for r in late), *feature_roots)
        loops.append(Loop(tuple(late), roots, [], last=True))
    _choose_buffers(loops, cost)
    return loops


def _choose_buffers(loops: Sequence[Loop], cost: Callable[[Expr], int]) -> None:
    """Decide which values a later loop finds in a row buffer."""
    first_in: dict[int, Loop] = {}
    buffered: set[int] = set()
    for loop in loops:
        known = set(first_in)
        for e in _below(loop.roots, lambda e: id(e) in buffered):
            if id(e) in buffered:
                continue
            below = _below([e], lambda n: id(n) in buffered) if id(e) in known else []
            dear = sum(1 if id(n) in buffered else cost(n) for n in below) > _BUFFER_ABOVE
            if dear and _is_frontier(e, loop, known, buffered):
                buffered.add(id(e))
                first_in[id(e)].buffered.append(e)
            first_in.setdefault(id(e), loop)


def _is_frontier(e: Expr, loop: Loop, known: set[int], buffered: set[int]) -> bool:
    """True where something that only this loop computes uses `e`."""
    if any(e is root for root in loop.roots):
        return True
    nodes = _below(loop.roots, lambda n: id(n) in buffered or id(n) in known)
    return any(e is a for n in nodes if id(n) not in known for a in n.args)

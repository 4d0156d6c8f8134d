"""Ranges cut out of a stretch: expressions, the tensors that they load, and the outputs of a kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from te_fuser.codegen.description import Target
from te_fuser.formula.expr import Axes, Expr

if TYPE_CHECKING:
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.steps.kernel_task import KernelOutput


@dataclass
class Leaf:
    """A tensor that a range loads: a value, a gradient, a statistic or a parameter."""

    ref: Ref
    axes: Axes
    width: int
    dtype: str
    value: int | None = None
    parameter: int | None = None

    def tensor(self) -> tuple[Axes, int, str]:
        """Its extent, its width and its dtype, as descriptions have them."""
        return self.axes, self.width, self.dtype


@dataclass
class Range:
    """Expressions cut at the beginning of a range, and the leaves they may have.

    Attributes:
        mapping: by its id, what a canonical expression is here.
        statistics: by its id, the digest of what backward may read in its place, a number for each row.
    """

    mapping: dict[int, Expr]
    statistics: dict[int, str]
    leaves: dict[str, Leaf]

    def of(self, e: Expr) -> Expr:
        """Expression that stands in this range for a canonical one."""
        return self.mapping[id(e)]

    def alias(self, e: Expr, dtype: str) -> Ref | None:
        """The tensor that `e` is, if it is one as a whole and in this dtype."""
        if e.op != "input" or e.is_part or e.axes != Axes.FULL:
            return None
        leaf = self.leaves[e.attrs[0]]
        return leaf.ref if leaf.dtype == dtype else None


class Gives:
    """Outputs of a kernel and their tensors; one that is there already gets another name."""

    def __init__(self, cut: Range) -> None:
        self._cut = cut
        self._stored: dict[Any, Ref] = {}
        self.targets: list[Target] = []
        self.outputs: list[KernelOutput] = []
        self.sums: list[Target] = []
        self.sum_outputs: list[KernelOutput] = []
        self.aliases: list[tuple[Ref, Ref]] = []
        self.maxima: list[Target] = []
        self.raised: list[Ref] = []

    def raise_by(self, name: str, e: Expr, width: int, slot: Ref) -> None:
        """Raise a number to the largest magnitude of `e`, of so many features."""
        self.maxima.append(Target(name, e, Axes.FULL, width, "float32"))
        self.raised.append(slot)

    def add(self, name: str, e: Expr, output: KernelOutput) -> None:
        """Give `e`: a sum where it has no rows, a tensor that is there, or one to store."""
        if not output.axes & Axes.OUTER:
            self.sums.append(_target(name, e, output))
            self.sum_outputs.append(output)
            return
        key = (id(e), output.dtype, output.axes, output.width, output.layout)
        same = self._stored.get(key) or (self._cut.alias(e, output.dtype) if output.layout == "rows" else None)
        if same is None:
            self._stored[key] = output.ref
            self.store(name, e, output)
        elif same != output.ref:
            self.aliases.append((output.ref, same))

    def store(self, name: str, e: Expr, output: KernelOutput) -> None:
        """Store `e`, whatever is there already."""
        self.targets.append(_target(name, e, output))
        self.outputs.append(output)

    def nothing(self) -> bool:
        return not (self.targets or self.sums or self.aliases or self.maxima)


def _target(name: str, e: Expr, output: KernelOutput) -> Target:
    return Target(name, e, output.axes, output.width, output.dtype, output.layout)

"""Tensors that a derived backward reads and writes: as many as one written by hand, no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from te_fuser.codegen.description import KernelCounts, KernelDescription, Target, describe
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Expr
from te_fuser.formula.reductions import substitute
from te_fuser.formula.traversal import topological
from te_fuser.ops import GEGLU, GELU, L2Norm, LayerNorm, RMSNorm, RowOp, SwiGLU

N = 64


def per_row_results(outputs: Iterable[Expr]) -> dict[int, Expr]:
    """Values of forward that have one number a row, as leaves: they are kept, not computed again."""
    found = [e for e in topological(outputs) if e.depth and e.axes & Axes.OUTER and not e.axes & Axes.FEATURE]
    return {id(e): expr.leaf(f"statistic{k}", Axes.ROWS) for k, e in enumerate(found)}


def backward(y: Expr, wanted: Sequence[Expr]) -> KernelDescription:
    """The kernel that makes the adjoints of `wanted`."""
    adjoints = differentiate({y: expr.leaf("d_y", Axes.FULL, y.width)}, wanted)
    exists = per_row_results([y])
    reduced = substitute(adjoints.values(), lambda e: exists.get(id(e)))
    targets, sums = [], []
    for leaf, adjoint in zip(wanted, reduced, strict=True):
        target = Target(f"d_{leaf.attrs[0]}", adjoint, leaf.axes, leaf.width, "float32")
        (targets if leaf.axes & Axes.OUTER else sums).append(target)
    read = [e for e in topological(reduced) if e.op == "input"]
    return describe("backward", targets, sums, {e.attrs[0]: (e.axes, e.attrs[2], "float32") for e in read})


# An op, features of x, how many numbers a row are kept, and what its backward moves.
COUNTS: dict[str, tuple[RowOp, int, int, KernelCounts]] = {
    **{f"LayerNorm, {centered}": (LayerNorm(N, zero_centered_gamma=centered), N, 2,
     KernelCounts(2, 1, 2, 1, 2)) for centered in (False, True)},
    **{f"RMSNorm, {centered}": (RMSNorm(N, zero_centered_gamma=centered), N, 1,
     KernelCounts(2, 1, 1, 1, 1)) for centered in (False, True)},
    "L2Norm": (L2Norm(), N, 1, KernelCounts(2, 1, 1, 1, 0)),
    "GELU, tanh": (GELU(), N, 0, KernelCounts(2, 1, 0, 0, 0)),
    "GELU, erf": (GELU("none"), N, 0, KernelCounts(2, 1, 0, 0, 0)),
    "SwiGLU": (SwiGLU(), 2 * N, 0, KernelCounts(2, 1, 0, 0, 0)),
    "GEGLU": (GEGLU(), 2 * N, 0, KernelCounts(2, 1, 0, 0, 0)),
    "SwiGLU, gate second": (SwiGLU(gate_first=False), 2 * N, 0, KernelCounts(2, 1, 0, 0, 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", COUNTS)
def test_backward_of_an_op_moves_no_more_than_one_by_hand(name: str) -> None:
    """Of a gated op one load of x, whose halves are offsets, and one store in two parts."""
    op, width, kept, counts = COUNTS[name]
    x, leaves = expr.leaf("x", Axes.FULL, width), [expr.leaf(name, Axes.FEATURE, N) for name in op.arguments()]
    found = backward(expr.value("y", op.compute(x, *leaves)), [x, *leaves])
    assert found.counts() == counts
    assert sum(load.axes == Axes.ROWS for load in found.loads) == kept
    assert found.width == N and len(found.stores[0].parts) == width // N

"""What a derived backward moves: as much as one written by hand, no more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest

from te_fuser.codegen.description import KernelCounts, KernelDescription, Target, describe
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Expr
from te_fuser.formula.reductions import substitute
from te_fuser.formula.traversal import topological
from te_fuser.ops import GEGLU, GELU, Add, Bias, Dropout, L2Norm, LayerNorm, RMSNorm, RowOp, SwiGLU

N = 64


def per_row_results(outputs: Iterable[Expr]) -> dict[int, Expr]:
    """What forward computes once a row on its way, as leaves: it is kept, not computed again."""
    found = [e for e in topological(outputs) if e.depth and e.axes & Axes.OUTER and not e.axes & Axes.FEATURE]
    return {id(e): expr.leaf(f"statistic{k}", Axes.ROWS) for k, e in enumerate(found)}


def backward(
    outputs: Iterable[Expr], wanted: Sequence[Expr], kept: Iterable[Expr] = (), keep_statistics: bool = True
) -> KernelDescription:
    """The kernel that makes the adjoints of `wanted`; `kept` are op outputs that backward reads."""
    seeds = {e: expr.leaf(f"d_{e.attrs[0]}", Axes.FULL, e.width) for e in outputs}
    adjoints = differentiate(seeds, wanted)
    exists = per_row_results(seeds) if keep_statistics else {}
    exists |= {id(e): expr.leaf(e.attrs[0], Axes.FULL, e.width) for e in kept}
    reduced = substitute(adjoints.values(), lambda e: exists.get(id(e)))
    targets, sums = [], []
    for leaf, adjoint in zip(wanted, reduced, strict=True):
        target = Target(f"d_{leaf.attrs[0]}", adjoint, leaf.axes, leaf.width, "float32")
        (targets if leaf.axes & Axes.OUTER else sums).append(target)
    read = [e for e in topological(reduced) if e.op == "input"]
    return describe("backward", targets, sums, {e.attrs[0]: (e.axes, e.attrs[2], "float32") for e in read})


def full(name: str, width: int = N) -> Expr:
    return expr.leaf(name, Axes.FULL, width)


def feature(name: str, width: int = N) -> Expr:
    return expr.leaf(name, Axes.FEATURE, width)


def norm_leaves(op: RowOp) -> list[Expr]:
    return [feature(name) for name in op.arguments()]


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
    x, leaves = full("x", width), norm_leaves(op)
    found = backward([expr.value("y", op.compute(x, *leaves))], [x, *leaves])
    assert found.counts() == counts
    assert sum(load.axes == Axes.ROWS for load in found.loads) == kept
    assert found.width == N and len(found.stores[0].parts) == width // N


def test_layer_norm_backward_that_computes_its_statistics_again() -> None:
    op = LayerNorm(N)
    x, leaves = full("x"), norm_leaves(op)
    found = backward([expr.value("y", op.compute(x, *leaves))], [x, *leaves], keep_statistics=False).counts()
    assert (found.loads, found.stores, found.column_sums) == (2, 1, 2)
    assert found.stages == 2 and found.row_sums == 4


def test_bias_dropout_add_fork_layer_norm_backward() -> None:
    """Reading the add's output: what dropout needs is drawn again, so nothing before the add is read."""
    x, skip, shift = full("x"), full("skip"), feature("shift")
    norm = LayerNorm(N)
    leaves = norm_leaves(norm)
    biased = expr.value("bias.output", Bias(N).compute(x, shift))
    dropped = expr.value("dropout.output", Dropout(0.1).compute(biased))
    total = expr.value("add.output", Add("skip").compute(dropped, skip))
    y = expr.value("y", norm.compute(total, *leaves))
    found = backward([y, total], [x, skip, shift, *leaves], kept=[total])
    assert found.counts() == KernelCounts(loads=3, stores=2, row_sums=2, stages=1, column_sums=3)
    assert {load.name for load in found.loads if load.axes == Axes.FULL} == {"add.output", "d_y", "d_add.output"}
    assert len(found.streams) == 1


@pytest.mark.parametrize("op", [GELU(), GELU("none")], ids=["tanh", "erf"])
def test_bias_gelu_backward(op: RowOp) -> None:
    x, bias = full("x"), feature("bias")
    biased = expr.value("bias.output", Bias(N).compute(x, bias))
    found = backward([expr.value("y", op.compute(biased))], [x, bias])
    assert found.counts() == KernelCounts(loads=2, stores=1, row_sums=0, stages=0, column_sums=1)


def test_two_norms_in_a_row_need_one_stage_each() -> None:
    first, second = RMSNorm(N), LayerNorm(N)
    x, gamma, leaves = full("x"), feature("gamma"), norm_leaves(second)
    y = second.compute(expr.value("first", first.compute(x, gamma)), *leaves)
    found = backward([expr.value("y", y)], [x, gamma, *leaves]).counts()
    assert (found.loads, found.stores, found.stages, found.column_sums) == (2, 1, 2, 3)
    assert found.row_sums == 3

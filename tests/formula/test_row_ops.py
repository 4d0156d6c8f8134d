"""Row ops: a trace computes what compute() does, its gradient is autograd's and moves no more than one by hand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen.description import KernelCounts, KernelDescription, Target, describe
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.expr import Expr
from te_fuser.formula.reductions import substitute
from te_fuser.formula.traversal import topological
from te_fuser.ops import GEGLU, GELU, L2Norm, LayerNorm, RMSNorm, RowOp, SwiGLU
from te_fuser.verify.examples import example_of
from tests.twins import assert_as_meant, tensor

SHAPE = (3, 5, 12)  # [samples, tokens, features] with batch_dim 0, [outer, samples, features] with batch_dim 1

# An op, and arguments that verify's examples of it do not have.
OPS: dict[str, tuple[type[RowOp], dict[str, Any]]] = {
    "bias": (ops.Bias, {}),
    "scale": (ops.Scale, {}),
    "scale_scalar": (ops.Scale, {"features": ()}),
    "scale_constant": (ops.Scale, {"features": None, "value": -0.3}),
    "gelu_tanh": (ops.GELU, {}),
    "gelu_erf": (ops.GELU, {"approximate": "none"}),
    "qgelu": (ops.QGELU, {}),
    "relu": (ops.ReLU, {}),
    "srelu": (ops.SReLU, {}),
    "silu": (ops.SiLU, {}),
    "sigmoid": (ops.Sigmoid, {}),
    "tanh": (ops.Tanh, {}),
    "glu": (ops.GLU, {}),
    "geglu": (ops.GEGLU, {}),
    "qgeglu": (ops.QGEGLU, {}),
    "reglu": (ops.ReGLU, {}),
    "sreglu": (ops.SReGLU, {}),
    "swiglu": (ops.SwiGLU, {}),
    "swiglu_gate_second": (ops.SwiGLU, {"gate_first": False}),
    "clamped_swiglu": (ops.ClampedSwiGLU, {"limit": 1.5}),
    "layer_norm": (ops.LayerNorm, {}),
    "layer_norm_zero_centered": (ops.LayerNorm, {"zero_centered_gamma": True}),
    "layer_norm_no_bias": (ops.LayerNorm, {"bias": False}),
    "layer_norm_plain": (ops.LayerNorm, {"elementwise_affine": False}),
    "rms_norm": (ops.RMSNorm, {}),
    "rms_norm_plain": (ops.RMSNorm, {"elementwise_affine": False}),
    "rms_norm_zero_centered": (ops.RMSNorm, {"zero_centered_gamma": True}),
    "l2_norm": (ops.L2Norm, {}),
    "adaptive_per_row": (ops.AdaptiveLayerNorm, {"per": "row", "batch_dim": None}),
    "adaptive_per_sample_0": (ops.AdaptiveLayerNorm, {"batch_dim": 0}),
    "adaptive_per_sample_1": (ops.AdaptiveLayerNorm, {"batch_dim": 1}),
    "softmax": (ops.Softmax, {}),
    "log_softmax": (ops.LogSoftmax, {}),
    "dropout": (ops.Dropout, {"p": 0.4}),
    "dropout_all": (ops.Dropout, {"p": 1.0}),
    "dropout_none": (ops.Dropout, {"p": 0.0}),
    "drop_path_0": (ops.DropPath, {"p": 0.4, "batch_dim": 0}),
    "drop_path_1": (ops.DropPath, {"p": 0.4, "batch_dim": 1}),
    "cast": (ops.Cast, {"dtype": torch.float64}),
    "fork": (ops.Fork, {}),
    "add": (ops.Add, {}),
    "output": (ops.Output, {}),
    "identity": (ops.Identity, {}),
}


def row_op(name: str, features: int, rng: torch.Generator | None = None) -> Any:
    """The op of that name, with random parameters."""
    kind, arguments = OPS[name]
    return example_of(kind, features, rng or torch.Generator().manual_seed(1), **arguments)


def test_the_table_has_every_row_op() -> None:
    public = {getattr(ops, name) for name in ops.__all__}
    rows = {kind for kind in public if issubclass(kind, RowOp)} - {RowOp, ops.GatedUnit, ops.Norm}
    rows -= {ops.Quantize, ops.QuantizeGradient}  # their adjoints are meant to be others: they have tests of their own
    assert rows == {kind for kind, _ in OPS.values()}


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("name", OPS)
def test_trace_is_compute_and_adjoint_is_autograd(name: str, scale: float) -> None:
    """By PyTorch's operations, which run the formula's trace and its adjoint as they are."""
    rng = torch.Generator().manual_seed(1)
    op = row_op(name, SHAPE[-1], rng)
    model = te_fuser.Sequential(op.double(), kernels="reference")
    named, per_sample = op.named_inputs().values(), (SHAPE[op.batch_dim() or 0], SHAPE[-1])
    given = {n.name: tensor(*(SHAPE if n.axes == Axes.FULL else per_sample), seed=k) for k, n in enumerate(named)}
    x = (scale * tensor(*SHAPE, seed=9)).detach().requires_grad_()
    assert_as_meant(model, x, **given)


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

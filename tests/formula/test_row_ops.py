"""Every row op: its trace computes what compute() does on tensors, and its derived gradient is autograd's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.formula import Axes
from te_fuser.ops.row_op import RowOp
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
    kind, arguments = OPS[name]
    op: Any = example_of(kind, SHAPE[-1], rng, **arguments)
    model = te_fuser.Sequential(op.double(), kernels="reference")
    named, per_sample = op.named_inputs().values(), (SHAPE[op.batch_dim() or 0], SHAPE[-1])
    given = {n.name: tensor(*(SHAPE if n.axes == Axes.FULL else per_sample), seed=k) for k, n in enumerate(named)}
    x = (scale * tensor(*SHAPE, seed=9)).detach().requires_grad_()
    assert_as_meant(model, x, **given)

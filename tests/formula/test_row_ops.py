"""Every row op: its trace computes what compute() does on tensors, and its derived gradient is autograd's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.formula import Axes, expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter, batch_layout
from te_fuser.formula.expr import Expr
from te_fuser.formula.random import RandomStream
from te_fuser.ops.base import OpCall
from te_fuser.ops.row_op import RowOp
from te_fuser.verify.examples import example_of

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


def row_op(name: str, features: int, rng: torch.Generator | None = None) -> RowOp:
    """The op of that name, with random parameters."""
    kind, arguments = OPS[name]
    op = example_of(kind, features, rng or torch.Generator().manual_seed(1), **arguments)
    assert isinstance(op, RowOp)
    return op


@dataclass
class Setting:
    """One op with tensors for it, in float64, and the same as leaves."""

    op: RowOp
    x: torch.Tensor
    tensors: dict[str, torch.Tensor]
    axes: dict[str, Axes]
    stream: RandomStream

    @property
    def rows(self) -> int:
        return self.x.numel() // self.x.shape[-1]

    @property
    def batch(self) -> tuple[int, int]:
        return batch_layout(self.x.shape, self.op.batch_dim())

    def leaves(self) -> dict[str, Expr]:
        width = self.x.shape[-1]
        return {name: expr.leaf(name, axes, width if axes & Axes.FEATURE else 1) for name, axes in self.axes.items()}

    def trace(self, leaves: dict[str, Expr]) -> Expr:
        return expr.lift(self.op.compute(*(leaves.get(name) for name in ("x", *self.op.arguments()))))

    def run(self, e: Expr, **more: torch.Tensor) -> torch.Tensor:
        width = {name: tensor.shape[-1] if tensor.dim() else 1 for name, tensor in self.tensors.items()}
        given = {
            name: t.detach().reshape(-1, width[name]) if self.axes[name] == Axes.FULL else t.detach()
            for name, t in self.tensors.items()
        }
        runner = Interpreter(given | more, {"keep": self.stream}, self.rows, self.x, self.batch)
        return runner.run([e])[0]

    def summed(self, adjoint: torch.Tensor, name: str) -> torch.Tensor:
        """The sum over rows that a leaf's extent asks for."""
        axes, like = self.axes[name], self.tensors[name]
        adjoint = adjoint.expand(self.rows, like.shape[-1] if axes & Axes.FEATURE else 1)
        if axes & Axes.OUTER:
            return adjoint.reshape(like.shape)
        if axes & Axes.BATCH:
            inner, samples = self.batch
            index = (torch.arange(self.rows) // inner) % samples
            return torch.zeros_like(like).index_add(0, index, adjoint)
        return adjoint.sum(0).reshape(like.shape)


def setting(name: str, scale: float = 1.0) -> Setting:
    rng = torch.Generator().manual_seed(1)
    op = row_op(name, SHAPE[-1], rng).double()
    op.train()
    x = scale * torch.randn(SHAPE, generator=rng, dtype=torch.float64)
    tensors, axes = {"x": x}, {"x": Axes.FULL}
    for name, parameter in op.named_parameters():
        tensors[name], axes[name] = parameter.detach(), Axes.FEATURE if parameter.dim() else Axes.NONE
    inner, samples = batch_layout(SHAPE, op.batch_dim())
    for name, given in op.named_inputs().items():
        assert given.axes is not None
        shape = SHAPE if given.axes == Axes.FULL else (samples, SHAPE[-1])
        tensors[name], axes[name] = torch.randn(shape, generator=rng, dtype=torch.float64), given.axes
    for tensor in tensors.values():
        tensor.requires_grad_()
    return Setting(op, x, tensors, axes, RandomStream(7, 3, 2, inner, samples))


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-12)


def test_the_table_has_every_row_op() -> None:
    public = {getattr(ops, name) for name in ops.__all__}
    rows = {kind for kind in public if issubclass(kind, RowOp)} - {RowOp, ops.GatedUnit, ops.Norm}
    rows -= {ops.Quantize, ops.QuantizeGradient}  # their adjoints are meant to be others: they have tests of their own
    assert rows == {kind for kind, _ in OPS.values()}


@pytest.mark.parametrize("scale", [1.0, 40.0])
@pytest.mark.parametrize("name", OPS)
def test_trace_is_compute_and_adjoint_is_autograd(name: str, scale: float) -> None:
    s = setting(name, scale)
    y = s.op.reference(OpCall(tensors={k: t for k, t in s.tensors.items() if k != "x"}, random=s.stream), s.x)
    leaves = s.leaves()
    e = s.trace(leaves)
    close(s.run(e).reshape(y.shape), y.detach())

    dy = torch.randn(y.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    wanted = torch.autograd.grad(y, list(s.tensors.values()), dy)
    adjoints = differentiate({e: expr.leaf("dy", Axes.FULL, y.shape[-1])}, leaves.values())
    for (leaf_name, leaf), want in zip(leaves.items(), wanted, strict=True):
        adjoint = s.run(adjoints[leaf], dy=dy.reshape(-1, dy.shape[-1]))
        close(s.summed(adjoint, leaf_name), want)

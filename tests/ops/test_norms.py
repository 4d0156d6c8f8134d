"""Norms beside torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.ops.base import OpCall
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal, values_and_gradients

SHAPE, N = (7, 5, 48), 48


def tensors(*names: str, shift: float = 0.0) -> dict[str, torch.Tensor]:
    parameters = {n: normal(N, seed=k + 1) * 0.5 + 0.5 for k, n in enumerate(names)}
    return {"x": normal(*SHAPE, scale=2.0) + shift, **parameters}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shift", [0.0, 100.0], ids=["centered", "far_from_zero"])
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["plain", "zero_centered"])
def test_layer_norm(dtype: torch.dtype, shift: float, offset: float) -> None:
    op = ops.LayerNorm(N, eps=1e-3, zero_centered_gamma=bool(offset))
    assert_as_good_as_torch(
        op,
        lambda x, weight, bias: F.layer_norm(x, (N,), weight + offset, bias, 1e-3),
        tensors("weight", "bias", shift=shift),
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_without_bias(dtype: torch.dtype) -> None:
    op = ops.LayerNorm(N, bias=False)
    assert_as_good_as_torch(op, lambda x, weight: F.layer_norm(x, (N,), weight), tensors("weight"), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("offset", [0.0, 1.0], ids=["plain", "zero_centered"])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    op = ops.RMSNorm(N, zero_centered_gamma=bool(offset))
    assert_as_good_as_torch(op, lambda x, weight: F.rms_norm(x, (N,), weight + offset, 1e-5), tensors("weight"), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_l2_norm(dtype: torch.dtype) -> None:
    def torch_form(x: torch.Tensor) -> torch.Tensor:
        return x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6)

    assert_as_good_as_torch(ops.L2Norm(), torch_form, tensors(), dtype)


def test_a_row_of_zeros_is_finite() -> None:
    x = torch.zeros(2, N)
    for op, parameters in ((ops.LayerNorm(N, bias=False), 1), (ops.RMSNorm(N), 1), (ops.L2Norm(), 0)):
        given = {"x": x} | ({"weight": torch.ones(N)} if parameters else {})

        def run(x: torch.Tensor, op: ops.RowOp = op, **others: torch.Tensor) -> torch.Tensor:
            return op.reference(OpCall(tensors=dict(others)), x)

        assert all(t.isfinite().all() for t in values_and_gradients(run, given).values())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adaptive_layer_norm_per_row(dtype: torch.dtype) -> None:
    op = ops.AdaptiveLayerNorm(N, per="row")
    given = {"x": normal(*SHAPE), "scale": normal(*SHAPE, seed=1), "shift": normal(*SHAPE, seed=2)}
    assert_as_good_as_torch(op, lambda x, scale, shift: F.layer_norm(x, (N,)) * (1 + scale) + shift, given, dtype)


@pytest.mark.parametrize("batch_dim", [0, 1, -2, -3])
def test_adaptive_layer_norm_per_sample(batch_dim: int) -> None:
    op = ops.AdaptiveLayerNorm(N, batch_dim=batch_dim)
    samples = SHAPE[batch_dim]
    given = {"x": normal(*SHAPE), "scale": normal(samples, N, seed=1), "shift": normal(samples, N, seed=2)}
    between = [samples if d == batch_dim % 3 else 1 for d in range(2)]

    def torch_form(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (N,)) * (1 + scale.reshape(*between, N)) + shift.reshape(*between, N)

    assert_as_good_as_torch(op, torch_form, given, torch.float64)


def test_adaptive_layer_norm_reads_the_names_it_was_given() -> None:
    op = ops.AdaptiveLayerNorm(N, scale="gamma", shift="beta", batch_dim=0)
    assert {argument: given.name for argument, given in op.named_inputs().items()} == {
        "scale": "gamma",
        "shift": "beta",
    }

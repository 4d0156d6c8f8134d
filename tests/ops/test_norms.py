"""Norms beside torch's."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_fuser
from te_fuser import ops
from te_fuser.ops.base import OpCall, Spec
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal, values_and_gradients
from tests.recorded import recorded
from tests.refused import raises

SHAPE, N = (7, 5, 48), 48


def tensors(*names: str, shift: float = 0.0) -> dict[str, torch.Tensor]:
    parameters = {n: normal(N, seed=k + 1) * 0.5 + 0.5 for k, n in enumerate(names)}
    return {"x": normal(*SHAPE, scale=2.0) + shift, **parameters}


def layer_norm(x: torch.Tensor, *parameters: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.layer_norm(x, (N,), *parameters, **how)


NORMS: dict[str, tuple[ops.RowOp, Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    **{
        f"layer_norm, {offset}, {shift} from zero": (
            ops.LayerNorm(N, eps=1e-3, zero_centered_gamma=bool(offset)),
            lambda x, weight, bias, by=offset: layer_norm(x, weight + by, bias, eps=1e-3),
            tensors("weight", "bias", shift=shift),
        )
        for offset, shift in itertools.product((0.0, 1.0), (0.0, 100.0))
    },
    **{
        f"rms_norm, {offset}": (
            ops.RMSNorm(N, zero_centered_gamma=bool(offset)),
            lambda x, weight, by=offset: F.rms_norm(x, (N,), weight + by, 1e-5),
            tensors("weight"),
        )
        for offset in (0.0, 1.0)
    },
    "layer_norm, no bias": (ops.LayerNorm(N, bias=False), lambda x, weight: layer_norm(x, weight), tensors("weight")),
    "layer_norm, plain": (ops.LayerNorm(N, elementwise_affine=False), layer_norm, tensors()),
    "rms_norm, plain": (ops.RMSNorm(N, elementwise_affine=False), lambda x: F.rms_norm(x, (N,), eps=1e-5), tensors()),
    "l2_norm": (ops.L2Norm(), lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6), tensors()),
    "adaptive": (
        ops.AdaptiveLayerNorm(N, scale="gamma", shift="beta", per="row"),
        lambda x, scale, shift: layer_norm(x) * (1 + scale) + shift,
        {"x": normal(*SHAPE), "scale": normal(*SHAPE, seed=1), "shift": normal(*SHAPE, seed=2)},
    ),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    op, torch_form, given = NORMS[name]
    assert_as_good_as_torch(op, torch_form, given, dtype)
    read = {argument: n.name for argument, n in op.named_inputs().items()}
    assert read == ({"scale": "gamma", "shift": "beta"} if name == "adaptive" else {})
    assert {*op.state_dict()} == given.keys() - {"x", *read}


def test_a_row_of_zeros_is_finite() -> None:
    x = torch.zeros(2, N)
    for op, parameters in ((ops.LayerNorm(N, bias=False), 1), (ops.RMSNorm(N), 1), (ops.L2Norm(), 0)):
        given = {"x": x} | ({"weight": torch.ones(N)} if parameters else {})

        def run(x: torch.Tensor, op: ops.RowOp = op, **others: torch.Tensor) -> torch.Tensor:
            return op.reference(OpCall(tensors=dict(others)), x)

        assert all(t.isfinite().all() for t in values_and_gradients(run, given).values())


@pytest.mark.parametrize("batch_dim", [0, 1, -2, -3])
def test_adaptive_layer_norm_per_sample(batch_dim: int) -> None:
    op = ops.AdaptiveLayerNorm(N, batch_dim=batch_dim)
    samples = SHAPE[batch_dim]
    given = {"x": normal(*SHAPE), "scale": normal(samples, N, seed=1), "shift": normal(samples, N, seed=2)}
    between = [samples if d == batch_dim % 3 else 1 for d in range(2)]

    def torch_form(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (N,)) * (1 + scale.reshape(*between, N)) + shift.reshape(*between, N)

    assert_as_good_as_torch(op, torch_form, given, torch.float64)


# ------------------------------------------------------------------------------- several trailing dimensions

SIZES = (4, 3, 5)
SEVERAL = {
    "layer_norm": (lambda: ops.LayerNorm(SIZES), lambda: nn.LayerNorm(SIZES)),
    "layer_norm_no_bias": (lambda: ops.LayerNorm(SIZES, bias=False), lambda: nn.LayerNorm(SIZES, bias=False)),
    "layer_norm_plain": (
        lambda: ops.LayerNorm(SIZES, elementwise_affine=False),
        lambda: nn.LayerNorm(SIZES, elementwise_affine=False),
    ),
    "rms_norm": (lambda: ops.RMSNorm(SIZES), lambda: nn.RMSNorm(SIZES, eps=1e-5)),
}


def with_gradients(m: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    y = m(x)
    dy = normal(*y.shape, seed=5).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [x, *m.parameters()], dy)]


@pytest.mark.parametrize("lead", [(), (7,), (2, 6), (0,)], ids=str)
@pytest.mark.parametrize("name", SEVERAL)
def test_a_row_of_several_dimensions(name: str, lead: tuple[int, ...]) -> None:
    ours, theirs = (make().double() for make in SEVERAL[name])
    for k, parameter in enumerate(theirs.parameters()):
        parameter.data.copy_(normal(*SIZES, seed=k))
    ours.load_state_dict(theirs.state_dict())
    x = normal(*lead, *SIZES, seed=9)
    alone, listed = with_gradients(ours, x), with_gradients(te_fuser.Sequential(ours), x)
    for got in (alone, listed):
        for mine, want in zip(got, with_gradients(theirs, x), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-10, atol=1e-11)
    given = {n: p.detach() for n, p in ours.named_parameters()}
    torch.testing.assert_close(ours.reference(OpCall(tensors=given), x), alone[0])
    assert ours.infer(Spec((*lead, *SIZES), x.dtype, x.device)).shape == x.shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_several_dimensions_by_a_kernel(dtype: torch.dtype) -> None:
    """Between other ops, with strides, and after eps changed."""
    norm = ops.LayerNorm(SIZES)
    model = te_fuser.Sequential(ops.GELU(), norm, ops.Scale(5)).to(dtype)
    x = normal(3, 2, *reversed(SIZES)).to(dtype).permute(0, 1, 4, 3, 2)
    if dtype == torch.bfloat16:
        te_fuser.verify(model, x)
    norm.eps = 0.5
    exact = copy.deepcopy(model).double()
    torch.testing.assert_close(model(x), exact(x.double()).to(dtype))
    torch.testing.assert_close(exact(x.double()), exact.reference(x.double()))


def test_several_dimensions_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"LayerNorm was made for \[\.\.\., 4, 3, 5\], got \[2, 3, 5\]"):
        ops.LayerNorm(SIZES).infer(Spec((2, 3, 5), torch.float32, torch.device("cpu")))
    for other in ((2, 5, 3, 2), (2, *reversed(SIZES)), (60,), (2, 60), (2, 3, 4, 5)):  # also with as many elements
        for norm in (ops.LayerNorm(SIZES), te_fuser.Sequential(ops.RMSNorm(SIZES, elementwise_affine=False))):
            raises(ValueError, r"op 0 .* was made for \[\.\.\., 4, 3, 5\], got .*: give it", norm, torch.randn(other))
    raises(TypeError, "whole number", ops.RMSNorm, (3, 2.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [1, 8])
def test_layer_norm_over_few_features_is_as_exact_as_its_meaning(features: int, dtype: torch.dtype) -> None:
    """One feature is 0 exactly, as is its gradient; half precision on a CPU is added up in float32."""
    op = ops.LayerNorm(features)
    torch.nn.init.normal_(op.weight)
    torch.nn.init.normal_(op.bias)
    with recorded():
        assert te_fuser.verify(op.to(dtype), torch.randn(515, features, dtype=dtype)).passed
        assert features == 1 or dtype == torch.float32 or te_fuser.verify(op, dtypes=[dtype]).passed
    x, scale, shift = (torch.randn(7, features, dtype=dtype) for _ in range(3))
    adaptive = ops.AdaptiveLayerNorm(features, per="row")
    assert te_fuser.verify(adaptive, x, scale=scale, shift=shift).passed
    assert features > 1 or torch.equal(adaptive(x, scale=scale, shift=shift), shift)


@pytest.mark.parametrize("second", [ops.LayerNorm(N), ops.RMSNorm(N), ops.LayerNorm(N, elementwise_affine=False)])
@pytest.mark.parametrize("special", [None, float("nan"), float("inf")])
def test_a_norm_behind_one_without_parameters(second: ops.RowOp, special: float | None) -> None:
    """The mean of what is centered is nothing, and no number where x has none."""
    model = te_fuser.Sequential(ops.LayerNorm(N, elementwise_affine=False), second)
    x = normal(3, N).float().requires_grad_()
    if special is not None:
        with torch.no_grad():
            x[1, 5] = special
    y, exact = model(x), copy.deepcopy(model).double().reference(x.double())
    torch.testing.assert_close(y, exact.float(), equal_nan=True)
    dy = normal(3, N, seed=1)
    torch.testing.assert_close(
        torch.autograd.grad(y, x, dy.float()), torch.autograd.grad(exact, x, dy), equal_nan=True, rtol=1e-4, atol=1e-5
    )

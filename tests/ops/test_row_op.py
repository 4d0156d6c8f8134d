"""Ops that go row by row, beside torch's functions: activations, gated units, softmax and norms."""

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
from te_fuser.ops.row_op import RowOp
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal, spec, values_and_gradients
from tests.recorded import recorded
from tests.refused import raises
from tests.twins import assert_same

Form = Callable[[torch.Tensor], torch.Tensor]

ACTIVATIONS: dict[str, tuple[RowOp, Form]] = {
    "gelu": (ops.GELU(), lambda x: F.gelu(x, approximate="tanh")),
    "gelu_none": (ops.GELU("none"), F.gelu),
    "qgelu": (ops.QGELU(), lambda x: x * torch.sigmoid(1.702 * x)),
    "relu": (ops.ReLU(), F.relu),
    "srelu": (ops.SReLU(), lambda x: F.relu(x) ** 2),
    "silu": (ops.SiLU(), F.silu),
}
BOUNDED: dict[str, tuple[RowOp, Form]] = {"sigmoid": (ops.Sigmoid(), torch.sigmoid), "tanh": (ops.Tanh(), torch.tanh)}
ROWWISE: dict[str, tuple[RowOp, Form]] = {
    "softmax": (ops.Softmax(), lambda x: F.softmax(x, -1)),
    "log_softmax": (ops.LogSoftmax(), lambda x: F.log_softmax(x, -1)),
}


def gated(activation: Form) -> Form:
    return lambda x: activation(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def gpt_oss(x: torch.Tensor) -> torch.Tensor:
    gate, linear = x.chunk(2, -1)
    gate, linear = gate.clamp(max=7.0), linear.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (linear + 1)


GATED: dict[str, tuple[RowOp, Form]] = {
    "glu": (ops.GLU(), gated(torch.sigmoid)),
    "geglu": (ops.GEGLU(), gated(lambda x: F.gelu(x, approximate="tanh"))),
    "geglu-erf": (ops.GEGLU(approximate="none"), gated(F.gelu)),
    "qgeglu": (ops.QGEGLU(), gated(lambda x: x * torch.sigmoid(1.702 * x))),
    "reglu": (ops.ReGLU(), gated(F.relu)),
    "sreglu": (ops.SReGLU(), gated(lambda x: F.relu(x) ** 2)),
    "swiglu": (ops.SwiGLU(), gated(F.silu)),
    "clamped_swiglu": (ops.ClampedSwiGLU(), gpt_oss),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ACTIVATIONS | BOUNDED | GATED | ROWWISE)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    op, torch_form = (ACTIVATIONS | BOUNDED | GATED | ROWWISE)[name]
    assert_as_good_as_torch(op, lambda x: torch_form(x), {"x": normal(40, 50, scale=3.0)}, dtype)


@pytest.mark.parametrize("name", GATED)
def test_gate_second_is_the_halves_exchanged(name: str) -> None:
    op = copy.deepcopy(GATED[name][0])
    op.gate_first = False  # type: ignore[assignment]
    x = normal(6, 10)
    want = GATED[name][1](torch.cat(x.chunk(2, -1)[::-1], -1))
    torch.testing.assert_close(op.reference(OpCall(), x), want)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_no_nan_at_large_inputs(name: str) -> None:
    """Value and gradient are those of x or 0 where the sigmoid or erf saturates, not infinity times 0."""
    op = ACTIVATIONS[name][0]
    large = torch.logspace(0, 18, 60)
    x = torch.cat([large, -large]).requires_grad_()
    y = op.reference(OpCall(), x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert y.isfinite().all() and dx.isfinite().all()
    assert torch.equal(y[60:][large > 100], torch.zeros_like(y[60:][large > 100]))
    if name != "srelu":
        assert torch.equal(y[:60][large > 100], large[large > 100])
        assert torch.equal(dx[:60][large > 100], torch.ones_like(dx[:60][large > 100]))


def test_limits_and_offset_of_clamped_swiglu() -> None:
    def meaning(x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, -1)
        gate, linear = gate.clamp(max=1.55), linear.clamp(-1.55, 1.55)  # no number of 16 bits lies at a limit
        return gate * torch.sigmoid(0.5 * gate) * (linear - 0.25)

    op = ops.ClampedSwiGLU(limit=1.55, alpha=0.5, offset=-0.25)
    for dtype in DTYPES:
        assert_as_good_as_torch(op, meaning, {"x": normal(5, 12, scale=2.0)}, dtype)
    op = ops.ClampedSwiGLU(limit=2.0, alpha=1.0)
    x = torch.tensor([[2.0, 2.5, -9.0, 2.0, -2.0, 3.0]], dtype=torch.float64, requires_grad=True)
    y = op.reference(OpCall(), x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    gate, linear = dx.chunk(2, -1)
    assert gate[0, 0] != 0 and gate[0, 1] == 0 and gate[0, 2] != 0
    assert linear[0, 0] != 0 and linear[0, 1] != 0 and linear[0, 2] == 0


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("gate_first", [True, False])
@pytest.mark.parametrize("size", [1, 3, 6])
def test_gates_in_blocks(size: int, gate_first: bool, kernels: str) -> None:
    """As with the blocks put in order first."""
    inner = ops.SwiGLU(gate_first=gate_first)
    op = ops.SwiGLU(gate_first=gate_first, glu_interleave_size=size)

    def meaning(x: torch.Tensor) -> torch.Tensor:
        blocks = x.unflatten(-1, (-1, 2, size))
        return inner.reference(OpCall(), torch.cat((blocks[..., 0, :].flatten(-2), blocks[..., 1, :].flatten(-2)), -1))

    for dtype in DTYPES:
        assert_as_good_as_torch(op, meaning, {"x": normal(2, 5, 12)}, dtype)
    model = te_fuser.Sequential(ops.Bias(12), op, ops.ReLU(), kernels=kernels)
    x = normal(2, 5, 12).float().requires_grad_()
    want = meaning(x).relu()
    assert_same(model(x), want, [x], tolerance=None)
    torch.testing.assert_close(model.reference(x), want)


def test_gates_in_blocks_are_verified_and_planned_anew() -> None:
    op = ops.ClampedSwiGLU(glu_interleave_size=2)
    assert te_fuser.verify(te_fuser.Sequential(ops.Linear(8, 16), op), dtypes=[torch.float32]).passed
    assert [low.op.kind for low in op.lower()] == [ops.Unflatten, ops.ClampedSwiGLU, ops.Flatten]
    x = normal(3, 8).float()
    before = op(x)
    op.glu_interleave_size = None
    assert not torch.equal(op(x), before) and op.lower()[0].op is op
    raises(ValueError, "from 1 on as glu_interleave_size, got 0", ops.GLU, glu_interleave_size=0)
    odd = ops.GLU(glu_interleave_size=4)
    raises(ValueError, r"glu_interleave_size = 4 features, two by two, got 12", odd.infer, spec(3, 12))
    raises(ValueError, r"Unflatten cannot take an input of shape \[3, 12\]", odd, normal(3, 12).float())


# --------------------------------------------------------------------------------- softmax, by kernels too


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("shift", [0.0, 100.0, 1e4])
def test_softmax_far_from_zero(name: str, shift: float) -> None:
    """Shifted rows give the same; the kernel, alone and in a list, errs as torch does."""
    op, torch_form = ROWWISE[name]
    x = (normal(6, 33, scale=3.0) + shift).float()
    exact = torch_form(x.double())
    for y in (op(x), op.reference(OpCall(), x)):
        torch.testing.assert_close(y.double(), exact, rtol=3e-6, atol=1e-6)
    te_fuser.verify(te_fuser.Sequential(op), x)
    if not shift:
        te_fuser.verify(te_fuser.Sequential(ops.Linear(33, 7), op, ops.Linear(7, 5)), x)


@pytest.mark.parametrize("name", ROWWISE)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softmax_of_infinities_and_of_one_feature(name: str, dtype: torch.dtype) -> None:
    op, torch_form = ROWWISE[name]
    x = normal(4, 5).to(dtype)
    x[0, 2] = x[1] = -torch.inf
    x[2, 0] = torch.inf
    x[3, 1] = torch.nan
    torch.testing.assert_close(op(x), torch_form(x), equal_nan=True)
    one = normal(3, 1).to(dtype).requires_grad_()
    y = op(one)
    assert torch.equal(y, torch_form(one)) and not torch.autograd.grad(y.sum(), one)[0].any()


def test_softmax_asks_for_no_feature_in_backward() -> None:
    """Row maxima that softmax subtracts get no gradient."""
    plan = te_fuser.Sequential(ops.Softmax()).plan(normal(4, 64).float().requires_grad_())
    (step,) = plan.backward
    assert "row_max" in str(step.task.description) and "where" not in str(step.task.description)


@pytest.mark.parametrize("name", ROWWISE)
def test_softmax_of_one_rounded_feature_has_no_gradient(name: str) -> None:
    """Forward's largest feature is not rounded, what backward reads is."""
    x = normal(7, 1).bfloat16().requires_grad_()
    y = te_fuser.Sequential(ops.GELU(), ROWWISE[name][0])(x)
    assert not torch.autograd.grad(y, x, torch.ones_like(y))[0].any()


SHAPE, N = (7, 5, 48), 48


def tensors(*names: str, shift: float = 0.0) -> dict[str, torch.Tensor]:
    parameters = {n: normal(N, seed=k + 1) * 0.5 + 0.5 for k, n in enumerate(names)}
    return {"x": normal(*SHAPE, scale=2.0) + shift, **parameters}


def layer_norm(x: torch.Tensor, *parameters: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.layer_norm(x, (N,), *parameters, **how)


NORMS: dict[str, tuple[ops.RowOp, Callable[..., torch.Tensor], dict[str, torch.Tensor]]] = {
    **{f"layer_norm, {offset}, {shift} from zero": (ops.LayerNorm(N, eps=1e-3, zero_centered_gamma=bool(offset)),
     lambda x, weight, bias, by=offset: layer_norm(x, weight + by, bias, eps=1e-3),
     tensors("weight", "bias", shift=shift)) for offset, shift in itertools.product((0.0, 1.0), (0.0, 100.0))},
    **{f"rms_norm, {offset}": (ops.RMSNorm(N, zero_centered_gamma=bool(offset)), lambda x, weight,
     by=offset: F.rms_norm(x, (N,), weight + by, 1e-5), tensors("weight")) for offset in (0.0, 1.0)},
    "layer_norm, no bias": (ops.LayerNorm(N, bias=False), lambda x, weight: layer_norm(x, weight), tensors("weight")),
    "layer_norm, plain": (ops.LayerNorm(N, elementwise_affine=False), layer_norm, tensors()),
    "rms_norm, plain": (ops.RMSNorm(N, elementwise_affine=False), lambda x: F.rms_norm(x, (N,), eps=1e-5), tensors()),
    "l2_norm": (ops.L2Norm(), lambda x: x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6), tensors()),
    "adaptive": (ops.AdaptiveLayerNorm(N, scale="gamma", shift="beta", per="row"), lambda x, scale,
     shift: layer_norm(x) * (1 + scale) + shift,
     {"x": normal(*SHAPE), "scale": normal(*SHAPE, seed=1), "shift": normal(*SHAPE, seed=2)}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norms_values_and_gradients(name: str, dtype: torch.dtype) -> None:
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
    "layer_norm_plain": (lambda: ops.LayerNorm(SIZES, elementwise_affine=False),
     lambda: nn.LayerNorm(SIZES, elementwise_affine=False)),
    "rms_norm": (lambda: ops.RMSNorm(SIZES), lambda: nn.RMSNorm(SIZES, eps=1e-5)),
}  # fmt: skip


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
        ops.LayerNorm(SIZES).infer(spec(2, 3, 5))
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

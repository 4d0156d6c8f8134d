"""Activations and gated units beside torch's functions."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from te_fuser.ops.base import OpCall, Spec
from te_fuser.ops.row_op import RowOp
from tests.ops.check import DTYPES, assert_as_good_as_torch, normal
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
    with pytest.raises(ValueError, match=r"glu_interleave_size = 4 features, two by two, got 12"):
        odd.infer(Spec((3, 12), torch.float32, torch.device("cpu")))
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

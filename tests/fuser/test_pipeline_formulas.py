"""Formulas that a user writes: how many features come out, and numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.formula import concat, split
from tests.twins import assert_as_meant, tensor


class Halved(ops.RowOp):
    """The first half, scaled."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 2.0, features))

    def compute(self, x: Any, weight: Any) -> Any:
        return split(x, 2)[0] * weight


class Beside(ops.RowOp):
    """x and another tensor, side by side."""

    def compute(self, x: Any, other: Any) -> Any:
        return concat([x, other])


def test_the_formula_says_how_many_features_come_out() -> None:
    model = te_fuser.Sequential(ops.Linear(4, 6), Halved(3), Beside(), ops.GELU(), ops.Linear(6, 2)).double()
    x, other = torch.randn(5, 4).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()
    y = model(x, other=other)
    assert y.shape == (5, 2)
    torch.testing.assert_close(y, model.reference(x, other=other))
    leaves = [x, other, *model.parameters()]
    found, wanted = (torch.autograd.grad(f(x, other=other).sin().sum(), leaves) for f in (model, model.reference))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert te_fuser.verify(model.float(), x.detach().float(), other=other.detach().float()).passed


def test_a_formula_that_is_a_number() -> None:
    class One(ops.RowOp):
        def compute(self, x: Any) -> Any:
            return 1.0

    x = torch.randn(3, 4)
    assert torch.equal(One()(x), torch.ones(3, 4))
    assert torch.equal(te_fuser.Sequential(One()).reference(x), torch.ones(3, 4))


class Affine(ops.RowOp):
    """y = x * weight + shift, with one number for all features, or one for each."""

    def __init__(self, *weight: int, shift: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(weight))
        self.shift = torch.nn.Parameter(torch.randn(shift))

    def compute(self, x: Any, weight: Any, shift: Any) -> Any:
        return x * weight + shift


@pytest.mark.parametrize(
    ("features", "weight", "shift", "kernels"),
    [(6, (1,), (), "auto"), (1, (1, 1, 1), (1,), "auto"), (6, (), (1, 1), "auto"), (1, (), (), "reference")],
)
def test_a_parameter_of_one_number_is_one_for_all_features(
    features: int, weight: tuple[int, ...], shift: tuple[int, ...], kernels: str
) -> None:
    model = te_fuser.Sequential(ops.Bias(features), Affine(*weight, shift=shift), ops.GELU(), kernels=kernels)
    te_fuser.verify(model, torch.randn(5, 3, features))
    assert_as_meant(model.double(), tensor(5, 3, features))
    op, x = model[1], tensor(5, features)
    leaves = (x, op.weight, op.shift)
    found = torch.autograd.grad(op(x).sin().sum(), leaves)
    wanted = torch.autograd.grad((x * op.weight.reshape(()) + op.shift.reshape(())).sin().sum(), leaves)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_a_parameter_that_is_not_named() -> None:
    class Hidden(ops.RowOp):
        def __init__(self, turned: bool) -> None:
            super().__init__()
            self.w, self.turned = torch.nn.Parameter(torch.ones(4)), turned

        def compute(self, x: Any) -> Any:
            return self.w * x if self.turned else x * self.w

    words = r"^op 0 \(Hidden '0'\): .* not Parameter; name the tensor as an argument, compute\(self, x, weight\)"
    for turned in (False, True):
        with pytest.raises(TypeError, match=words):
            te_fuser.Sequential(Hidden(turned))(torch.randn(3, 4))


class Powers(ops.RowOp):
    """x to powers that float32 does not hold."""

    powers = (1e300, -1e300, 3e38, -(2.0**64))

    def compute(self, x: Any) -> Any:
        return concat([x**power for power in self.powers])


def test_powers_that_float32_does_not_hold() -> None:
    x = torch.tensor([[1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]])
    want = torch.cat([x.double().pow(power).float() for power in Powers.powers], -1)
    torch.testing.assert_close(te_fuser.Sequential(Powers())(x), want, equal_nan=True)

"""Formulas that a user writes: how many features come out, and numbers."""

from __future__ import annotations

from typing import Any

import torch

import te_fuser
from te_fuser import ops
from te_fuser.formula import concat, split


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

"""Stretches cut in several places: what each range's kernel must still give."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.formula import exp, row_max, row_sum
from tests.fuzz.covers import random_cover
from tests.twins import assert_as_meant, sequential, tensor


@pytest.mark.parametrize("branch", [(), (ops.GELU(),), (ops.Fork("inner"), ops.GELU(), ops.Add("inner"))])
def test_both_ends_of_a_fork_enter_one_range(branch: tuple[ops.FusableOperation, ...]) -> None:
    # They are one leaf of its expressions, and each has a gradient that the fork's own backward reads.
    model = sequential(ops.Linear(4, 4), te_fuser.Residual(*branch), ops.GELU())
    with te_fuser.fusions.only():
        assert_as_meant(model, tensor(3, 4))


@pytest.mark.parametrize("seed", range(6))
def test_forks_in_stretches_cut_anywhere(seed: int) -> None:
    residual = te_fuser.Residual
    model = sequential(
        ops.LayerNorm(6), residual(residual(), ops.GELU(), residual(ops.Bias(6))), ops.Output("y"), residual(ops.SiLU())
    )
    with random_cover(seed):
        assert_as_meant(model, tensor(5, 6), outputs=("y",))


class Softmax(ops.RowOp):
    """exp(x - max(x)) over its sum."""

    def compute(self, x: Any) -> Any:
        e = exp(x - row_max(x))
        return e / row_sum(e)


@pytest.mark.parametrize("seed", range(6))
def test_the_largest_feature_is_that_of_what_is_read(seed: int) -> None:
    # The maximum that forward took of float32 sums is above all of them once they are rounded to bfloat16: no feature
    # was the largest, and the gradient was divided by their number.
    model = te_fuser.Sequential(ops.Add("other"), Softmax(), ops.Scale(16), kernels="reference").to(torch.bfloat16)
    x, other = (tensor(64, 16, dtype=torch.bfloat16, seed=seed + k) for k in (0, 1))
    with random_cover(seed):
        model(x, other=other).float().square().sum().backward()
    got = x.grad
    x.grad = None
    model.reference(x, other=other).float().square().sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=0.1, atol=0.02)

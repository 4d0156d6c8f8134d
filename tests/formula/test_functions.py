"""The functions on tensors, on numbers, and where they differ from torch's names."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fuser import formula
from te_fuser.formula import clamp, concat, keep_mask, maximum, minimum, row_max, row_mean, row_sum, split, where
from te_fuser.formula.random import RandomStream, using

POINTWISE = ["exp", "log", "tanh", "erf", "sigmoid", "sqrt", "rsqrt", "absolute", "relu"]


@pytest.mark.parametrize("name", POINTWISE)
def test_pointwise_on_tensors_and_numbers(name: str) -> None:
    function: Callable[[Any], Any] = getattr(formula, name)
    on_torch = getattr(torch, name)
    x = torch.tensor([0.25, 1.0, 3.5], dtype=torch.float64)
    torch.testing.assert_close(function(x), on_torch(x))
    assert math.isclose(function(0.25), on_torch(x)[0].item(), rel_tol=1e-12)


def test_everything_public_is_exported() -> None:
    assert all(hasattr(formula, name) for name in formula.__all__)


def test_reductions_keep_one_column() -> None:
    x = torch.randn(3, 4)
    for function, want in ((row_sum, x.sum(1)), (row_mean, x.mean(1)), (row_max, x.amax(1))):
        assert torch.equal(function(x), want[:, None])


def test_numbers_beside_tensors() -> None:
    x = torch.tensor([-2.0, 0.5, 9.0], dtype=torch.float64)
    assert torch.equal(maximum(x, 0), x.clamp(min=0)) and torch.equal(minimum(1, x), x.clamp(max=1))
    assert maximum(1.0, 2.0) == 2.0
    with torch.device("meta"):  # a number is one wherever new tensors are made
        assert maximum(1.0, 2.0).item() == 2.0
    assert maximum(0, x.to("meta")).is_meta
    assert torch.equal(clamp(x, high=1.0), x.clamp(max=1))
    assert torch.equal(where(x > 0, x, 0.0), x.relu()) and where(x > 0, x, 0.0).dtype == torch.float64


def test_a_condition_may_be_numbers() -> None:
    x, mask = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 2.0])
    assert torch.equal(where(mask, x, -x), torch.tensor([-1.0, 2.0, 3.0]))


def test_split_and_concat() -> None:
    x = torch.randn(3, 6)
    first, second, third = split(x, 3)
    assert torch.equal(second, x[:, 2:4]) and torch.equal(concat([first, second, third]), x)
    row = torch.randn(3, 1)
    assert torch.equal(concat([row, first]), torch.cat([row, row, first], 1))
    assert torch.equal(concat([0.0, first])[:, :2], torch.zeros(3, 2))
    with pytest.raises(ValueError, match="cannot split 6 features into 4"):
        split(x, 4)
    assert split(torch.randn(0, 6), 2)[1].shape == (0, 3)


def test_keep_mask_needs_a_stream() -> None:
    x = torch.ones(4, 8)
    with pytest.raises(RuntimeError, match="random stream"):
        keep_mask(x, 0.5)
    with using(RandomStream(1, 0, 0)):
        assert keep_mask(x, 0.0).min() == 1 and keep_mask(x, 1.0).max() == 0
        with pytest.raises(ValueError, match=r"\[0, 1\], got 1.5"):
            keep_mask(x, 1.5)

"""Kernel descriptions run by PyTorch operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from te_fuser import ops
from te_fuser.formula import concat, row_sum, split
from tests.twins import assert_as_meant, sequential, tensor


class HalfConstant(ops.RowOp):
    """One half as it is, the other a number."""

    def compute(self, x: Any) -> Any:
        return concat([split(x, 2)[1], 3.0])


class HalfSum(ops.RowOp):
    """One half as it is, the other the row's sum."""

    def compute(self, x: Any) -> Any:
        return concat([row_sum(x), split(x, 2)[0]])


@pytest.mark.parametrize("op", [HalfConstant(), HalfSum()], ids=lambda op: type(op).__name__)
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_part_without_features_fills_its_place(op: ops.RowOp, rows: int) -> None:
    y = assert_as_meant(sequential(op, ops.Bias(6)), tensor(rows, 6))[0]
    assert y.shape == (rows, 6) and torch.isfinite(y).all()

"""Sigmoid: 1 / (1 + exp(-x))."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import sigmoid
from te_fuser.ops.row_op import RowOp


class Sigmoid(RowOp):
    """Bring each feature into (0, 1): y = 1 / (1 + exp(-x)), pointwise."""

    def compute(self, x: Any) -> Any:
        return sigmoid(x)

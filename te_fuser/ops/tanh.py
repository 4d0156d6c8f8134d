"""Tanh: the hyperbolic tangent."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import tanh
from te_fuser.ops.row_op import RowOp


class Tanh(RowOp):
    """Bring each feature into (-1, 1): y = tanh(x), pointwise."""

    def compute(self, x: Any) -> Any:
        return tanh(x)

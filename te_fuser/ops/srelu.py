"""SReLU: the square of ReLU."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import relu
from te_fuser.ops.row_op import RowOp


class SReLU(RowOp):
    """The square of ReLU: y = max(x, 0)^2, pointwise.

    Source: So et al., "Primer: searching for efficient Transformers for language modeling" (2021).
    """

    role = "srelu"

    def compute(self, x: Any) -> Any:
        positive = relu(x)
        return positive * positive

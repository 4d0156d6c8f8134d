"""QGELU: the sigmoid approximation of GELU."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import sigmoid
from te_fuser.ops.row_op import RowOp


class QGELU(RowOp):
    """GELU approximated by a logistic gate: y = x * sigmoid(1.702 * x), pointwise.

    Source: Hendrycks and Gimpel, "Gaussian error linear units (GELUs)" (2016), section 2.
    """

    def compute(self, x: Any) -> Any:
        return x * sigmoid(1.702 * x)

"""L2Norm: each row brought to Euclidean length 1."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import row_sum, rsqrt
from te_fuser.ops.checks import check_eps
from te_fuser.ops.row_op import RowOp


class L2Norm(RowOp):
    """Divide each row by its Euclidean length: y = x / sqrt(sum(x^2) + eps).

    Args:
        eps: added to the sum of squares, as Transformer Engine does (torch.nn.functional.normalize limits the length
            from below instead).

    Source: Henry et al., "Query-key normalization for Transformers" (2020).
    """

    autocast = "float32"

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = check_eps(self, eps)

    def compute(self, x: Any) -> Any:
        return x * rsqrt(row_sum(x * x) + self.eps)

"""LogSoftmax: the logarithms of the features of each row as probabilities."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import exp, log, row_sum
from te_fuser.ops.checks import check_last
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.softmax import shifted


class LogSoftmax(RowOp):
    """Turn the features of each row into logarithms of probabilities: y = x - log(sum(exp(x))).

    Like torch.nn.LogSoftmax(dim=-1): right also where the probability is too small for its dtype.

    Args:
        dim: -1; what goes over another dimension stays torch.nn's module.
    """

    autocast = "float32"

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        check_last(self, dim)

    def compute(self, x: Any) -> Any:
        z = shifted(x)
        return z - log(row_sum(exp(z)))

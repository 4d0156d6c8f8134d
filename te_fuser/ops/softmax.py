"""Softmax and its logarithm."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import detach, exp, log, row_max, row_sum
from te_fuser.ops.checks import check_last
from te_fuser.ops.row_op import RowOp


def shifted(x: Any) -> Any:
    """x less its row's largest feature, so that no exponential overflows."""
    return x - detach(row_max(x))


class Softmax(RowOp):
    """Turn the features of each row into probabilities: y = exp(x) / sum(exp(x)).

    Like torch.nn.Softmax(dim=-1): -inf gives 0, and a row of nothing else NaN.

    Args:
        dim: -1; what goes over another dimension stays torch.nn's module.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        check_last(self, dim)

    def compute(self, x: Any) -> Any:
        e = exp(shifted(x))
        return e / row_sum(e)


class LogSoftmax(RowOp):
    """Turn the features of each row into logarithms of probabilities: y = x - log(sum(exp(x))).

    Like torch.nn.LogSoftmax(dim=-1): right also where the probability is too small for its dtype.

    Args:
        dim: -1; what goes over another dimension stays torch.nn's module.
    """

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        check_last(self, dim)

    def compute(self, x: Any) -> Any:
        z = shifted(x)
        return z - log(row_sum(exp(z)))

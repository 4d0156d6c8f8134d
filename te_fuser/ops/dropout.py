"""Dropout of elements and of whole samples."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import keep_mask
from te_fuser.ops.base import Spec
from te_fuser.ops.checks import check_batch_dim, check_probability, whole_number
from te_fuser.ops.row_op import RowOp


class Dropout(RowOp):
    """Drop each element with probability p while training, and enlarge the others: y = x * keep / (1 - p).

    `keep` is a function of the seed, the op's stream and the element's place alone, so backward draws it again
    instead of keeping it. p is rounded to a multiple of 2**-16. In eval mode, and for p = 0, y = x and nothing is
    drawn.

    Raises:
        ValueError: when p is not in [0, 1].

    Source: Srivastava et al., "Dropout: a simple way to prevent neural networks from overfitting" (2014).
    """

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = check_probability(p)

    def draws(self) -> bool:
        return self.training and self.p > 0

    def compute(self, x: Any) -> Any:
        if not self.draws():
            return x
        return x * (keep_mask(x, self.p) * kept_scale(self.p))


def kept_scale(p: float) -> float:
    """1 / (1 - p), and 1 where nothing is kept."""
    return 1.0 / (1.0 - p) if p < 1.0 else 1.0


class DropPath(RowOp):
    """Drop each sample with probability p while training, and enlarge the others: y = x * keep[sample] / (1 - p).

    In eval mode, and for p = 0, y = x and nothing is drawn.

    Args:
        p: the drop probability, rounded to a multiple of 2**-16.
        batch_dim: the dimension of x that counts samples; it has no default, since layouts differ.

    Raises:
        ValueError: when p is not in [0, 1], or x has no such dimension.
        TypeError: when p is no number, or batch_dim no whole one.

    Source: Huang et al., "Deep networks with stochastic depth" (2016).
    """

    def __init__(self, p: float, batch_dim: int) -> None:
        super().__init__()
        self.p = check_probability(p)
        self.sample_dim = whole_number(type(self).__name__, "batch_dim", batch_dim)

    def draws(self) -> bool:
        return self.training and self.p > 0

    def batch_dim(self) -> int | None:
        return self.sample_dim if self.draws() else None

    def compute(self, x: Any) -> Any:
        if not self.draws():
            return x
        return x * (keep_mask(x, self.p, per_sample=True) * kept_scale(self.p))

    def infer(self, x: Spec) -> Spec:
        check_batch_dim(self, x, self.sample_dim)
        return super().infer(x)

"""Dropout: each element dropped with some probability while training."""

from __future__ import annotations

from typing import Any

from te_fuser.formula import keep_mask
from te_fuser.ops.checks import check_probability
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

    prototype_arguments = {"p": 0.25}

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

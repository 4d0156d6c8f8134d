"""RMSNorm: each row brought to a mean square of 1, then scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fuser.formula import row_mean, rsqrt
from te_fuser.ops.norm import Norm


class RMSNorm(Norm):
    """Divide each row by its root mean square: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        features: the size of the last dimension, or the sizes of the last ones, which are a row together; x is
            [..., *features], `weight` is [*features].
        eps: added to the mean square. 1e-5 by default, as in Transformer Engine and Llama 2; torch.nn.RMSNorm's
            default is the machine epsilon of x's dtype, so give both one when they are to agree.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        elementwise_affine: whether there is a weight.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(features, eps, zero_centered_gamma, {"weight": elementwise_affine}, dtype, device)

    def compute(self, x: Any, weight: Any = None) -> Any:
        y = x * rsqrt(row_mean(x * x) + self.eps)
        return y if weight is None else y * (weight + 1.0 if self.zero_centered_gamma else weight)

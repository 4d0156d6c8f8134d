"""RMSNorm: each row brought to a mean square of 1, then scaled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fuser.formula import row_mean, rsqrt
from te_fuser.ops.base import RowOp
from te_fuser.ops.checks import feature_size
from te_fuser.ops.parameters import alike, empty, fill, randomized


class RMSNorm(RowOp):
    """Divide each row by its root mean square: y = x / sqrt(mean(x^2) + eps) * weight.

    Args:
        features: the size of the last dimension; x is [..., features], `weight` is [features].
        eps: added to the mean square. 1e-5 by default, as in Transformer Engine and Llama 2; torch.nn.RMSNorm's
            default is the machine epsilon of x's dtype, so give both one when they are to agree.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """

    autocast = "float32"
    sized = True
    weight: torch.nn.Parameter | None

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = feature_size(features)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = empty(self.features, dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with factor 1."""
        fill(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def compute(self, x: Any, weight: Any) -> Any:
        rstd = rsqrt(row_mean(x * x) + self.eps)
        return x * rstd * (weight + 1.0 if self.zero_centered_gamma else weight)

    def example(self, features: int, rng: torch.Generator) -> RMSNorm:
        return randomized(alike(self, features), rng, center=0.0 if self.zero_centered_gamma else 1.0)

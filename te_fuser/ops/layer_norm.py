"""LayerNorm: each row brought to mean 0 and variance 1, then scaled and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from te_fuser.formula import row_mean, rsqrt
from te_fuser.ops.base import RowOp
from te_fuser.ops.checks import feature_size
from te_fuser.ops.parameters import alike, empty, fill, randomized


def normalize(x: Any, eps: float) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) of each row; the variance is that of all features, without correction."""
    centered = x - row_mean(x)
    return centered * rsqrt(row_mean(centered * centered) + eps)


class LayerNorm(RowOp):
    """Normalize each row: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Args:
        features: the size of the last dimension; x is [..., features], `weight` and `bias` are [features].
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        bias: whether there is one; it starts at 0.
        dtype: the parameters', torch's default if None.
        device: the parameters', torch's default if None.

    Source: Ba et al., "Layer normalization" (2016).
    """

    autocast = "float32"
    sized = True
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = feature_size(features)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = empty(self.features, dtype=dtype, device=device)
        if bias:
            self.bias = empty(self.features, dtype=dtype, device=device)
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start with factor 1 and bias 0."""
        fill(self.weight, 0.0 if self.zero_centered_gamma else 1.0)
        fill(self.bias, 0.0)

    def compute(self, x: Any, weight: Any, bias: Any = None) -> Any:
        y = normalize(x, self.eps) * (weight + 1.0 if self.zero_centered_gamma else weight)
        return y if bias is None else y + bias

    def example(self, features: int, rng: torch.Generator) -> LayerNorm:
        return randomized(alike(self, features), rng, center=0.0 if self.zero_centered_gamma else 1.0)

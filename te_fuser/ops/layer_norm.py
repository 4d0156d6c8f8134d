"""LayerNorm: each row brought to mean 0 and variance 1, then scaled and shifted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from te_fuser.formula import row_mean, rsqrt
from te_fuser.ops.base import Spec
from te_fuser.ops.norm import Norm
from te_fuser.ops.tensor_function import TorchFunction

_FEW = 8


def normalize(x: Any, eps: float, features: int) -> Any:
    """(x - mean(x)) / sqrt(var(x) + eps) of each row; the variance is that of all features, without correction.

    Of one feature that is 0 whatever it is, and so is its gradient, exactly: no mean is taken.
    """
    centered = x - (x if features == 1 else row_mean(x))
    return centered * rsqrt(row_mean(centered * centered) + eps)


class LayerNorm(Norm):
    """Normalize each row: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

    Args:
        features: the size of the last dimension, or the sizes of the last ones, which are a row together; x is
            [..., *features], `weight` and `bias` are [*features].
        eps: added to the variance.
        zero_centered_gamma: the factor is 1 + weight, and weight starts at 0, not 1.
        elementwise_affine: whether there are weight and bias.
        bias: whether there is a bias, where there is a weight; it starts at 0.
        dtype: the parameters', torch's default if None.
        device: the parameters', torch's default if None.

    Source: Ba et al., "Layer normalization" (2016).
    """

    def __init__(
        self,
        features: int | Sequence[int],
        eps: float = 1e-5,
        *,
        zero_centered_gamma: bool = False,
        elementwise_affine: bool = True,
        bias: bool = True,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        there = {"weight": elementwise_affine, "bias": elementwise_affine and bias}
        super().__init__(features, eps, zero_centered_gamma, there, dtype, device)

    def compute(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        y = normalize(x, self.eps, self.features)
        if weight is None:
            return y
        y = y * (weight + 1.0 if self.zero_centered_gamma else weight)
        return y if bias is None else y + bias

    def by_torch(self, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
        # PyTorch's errs several times as much over few features, and on a CPU it adds up half precision in that.
        coarse = self.features < _FEW or (x.device.type == "cpu" and x.dtype.itemsize < 4)
        if self.zero_centered_gamma or coarse:
            return None
        sizes, eps, there = (self.features,), self.eps, [name for name in ("weight", "bias") if name in names]

        def layer_norm(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Any:
            return functional.layer_norm(x, sizes, weight, bias, eps)

        keeps = {"input": ("input", *there[:1]), "weight": ("input",)}
        return TorchFunction("F.layer_norm", layer_norm, ("input", *there), keeps, statistics=2)

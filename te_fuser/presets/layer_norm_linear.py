"""LayerNormLinear: a norm, a product and a bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.presets.affine import Affine, AffineArguments
from te_fuser.presets.arguments import check_epsilon
from te_fuser.presets.norm import Normed


@dataclass(frozen=True)
class LayerNormLinearArguments(AffineArguments, Normed):
    """What `LayerNormLinear` takes as keywords."""


class LayerNormLinear(Affine):
    """y = norm(x) W^T + bias.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's; `weight` is [out_features, in_features], `bias` [out_features].
        eps: added to the norm's variance.
        bias: whether there is one.
        normalization: "LayerNorm" or "RMSNorm"; its parameters are `layer_norm_weight` and `layer_norm_bias`.
        zero_centered_gamma: the norm's factor is 1 + its weight, which starts at 0.
        return_layernorm_output: calls return what the norm gives, too, behind everything else.
        return_layernorm_output_gathered: with `sequence_parallel` and by column that is of all ranks' rows, and of its
            gradient each has a term; else of this rank's.
        parallel_mode, skip_weight_param_allocation, return_bias, parameters_split: see `Linear`.
        **keywords: what presets share, see `te_fuser.presets.arguments.Common`, and options of lists.
    """

    flattens = True
    arguments = LayerNormLinearArguments

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, bias: bool = True, **keywords: Any
    ) -> None:
        super().__init__(in_features, out_features, bias, check_epsilon("eps", eps), **keywords)
        self.eps = eps

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Sequential of a norm and a Linear with the same function, over copies of the parameters."""
        weight, bias = self.get_parameter("layer_norm_weight"), self._parameters.get("layer_norm_bias")
        assert self.norm is not None
        return torch.nn.Sequential(self.norm.to_torch(weight, bias), self.linear_to_torch()).train(self.training)

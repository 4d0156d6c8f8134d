"""Linear: a product and a bias."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.presets.affine import Affine


class Linear(Affine):
    """y = x W^T + bias.

    Args:
        in_features: the size of x's last dimension; x is [..., in_features].
        out_features: the size of y's; `weight` is [out_features, in_features], `bias` [out_features].
        bias: whether there is one.
        parallel_mode: "column" or "row", in any case: which dimension of the weight ranks cut: see `ops.Cut`.
        skip_weight_param_allocation: there are no parameters, and each call gives weight and bias.
        return_bias: the bias is not added but returned: (y, bias).
        parameters_split: names of parts that are parameters of their own, name_weight and name_bias, of equal sizes or
            those that a mapping says; they lie in one buffer.
        **keywords: what presets share, see `te_fuser.presets.arguments.Common`, and options of lists.
    """

    flattens = True

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **keywords: Any) -> None:
        super().__init__(in_features, out_features, bias, **keywords)

    def to_torch(self) -> torch.nn.Module:
        """torch.nn.Linear with the same function, over copies of the parameters."""
        return self.linear_to_torch().train(self.training)

"""Bias: a learnable number added to each feature; Scale: features times a number that is learned or given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_fuser.ops.checks import feature_size, real_number
from te_fuser.ops.construction import empty, fill
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.sharing import COLUMN, Cut


class Bias(Cut, RowOp):
    """Add a learnable number to each feature: y = x + bias.

    With `parallel_mode` "column", see `Cut`, each rank has its part of x's features and of the bias. Behind a product
    that is cut by "row" it comes once, as that gives the sum.

    Args:
        features: the size of the last dimension; x is [..., features], `bias` is [features] and starts at 0.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.
    """

    sized = True
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        features: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.features = feature_size(features)
        self.bias = empty(self.features, dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at 0."""
        fill(self.bias, 0.0)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        cut = self.parallel_mode == COLUMN
        return {"bias": (self.share(self.features, "features"),)} if cut else {}

    def compute(self, x: Any, bias: Any) -> Any:
        return x + bias


class Scale(RowOp):
    """Multiply by one number for each feature, one for all, or a constant: y = x * weight.

    `Scale(n)` learns a weight [n] (LayerScale: Touvron et al., "Going deeper with image transformers", 2021);
    `Scale(())` learns one number for all features (ReZero: Bachlechner et al., "ReZero is all you need", 2020);
    `Scale(value=0.5)` learns nothing and multiplies by 0.5.

    Args:
        features: the size of the last dimension, () for one learnable number, None for a constant.
        value: the constant, or what every learnable number starts at.
        dtype: the parameter's, torch's default if None.
        device: the parameter's, torch's default if None.
    """

    sized = True
    weight: torch.nn.Parameter | None

    def __init__(
        self,
        features: int | Sequence[int] | None = None,
        value: float = 1.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.value = real_number("Scale", "value", value)
        self.features = None if features is None or features == () else feature_size(features)
        if features is None:
            self.register_parameter("weight", None)
        else:
            shape = () if self.features is None else (self.features,)
            self.weight = empty(*shape, dtype=dtype, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at `value`."""
        fill(self.weight, self.value)

    def compute(self, x: Any, weight: Any = None) -> Any:
        return x * (self.value if weight is None else weight)

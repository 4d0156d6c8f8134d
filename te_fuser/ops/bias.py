"""Bias: a learnable number added to each feature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_fuser.ops.checks import feature_size
from te_fuser.ops.cut import COLUMN, Cut
from te_fuser.ops.parameters import empty, fill
from te_fuser.ops.row_op import RowOp


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

"""Cast: another dtype."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.ops.base import FusableOperation, RowOp


class Cast(RowOp):
    """Give the same numbers in another dtype: y = x rounded to `dtype`; the gradient goes back in x's dtype.

    Raises:
        TypeError: for a dtype that is not floating-point.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise TypeError(f"Cast takes a floating-point dtype such as torch.bfloat16, got {dtype!r}")
        self.dtype = dtype

    def compute(self, x: Any) -> Any:
        return x

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def example(self, features: int, rng: torch.Generator) -> Cast:
        return Cast(self.dtype)

    def extra_repr(self) -> str:
        return str(self.dtype)


FusableOperation.make_cast = Cast

"""Cast: another dtype."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.ops.row_op import RowOp


class Cast(RowOp):
    """Give the same numbers in another dtype: y = x rounded to `dtype`; the gradient goes back in x's dtype.

    Raises:
        TypeError: for a dtype that is none of float32, bfloat16, float16, float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(
                f"Cast takes a floating-point dtype such as torch.bfloat16, got {dtype!r}: float32, bfloat16, "
                "float16 or float64"
            )
        self.dtype = dtype

    def compute(self, x: Any) -> Any:
        return x

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def extra_repr(self) -> str:
        return str(self.dtype)

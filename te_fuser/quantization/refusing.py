"""What products in regions refuse, in words."""

from __future__ import annotations

from typing import NoReturn

import torch

from te_fuser.dtypes import text_of
from te_fuser.fuser.run.tracers import REFERENCE


def refuse_dtype(path: str, what: str, dtype: torch.dtype) -> NoReturn:
    """Refuse a product of another dtype than those that products of 8 bits give.

    Args:
        path: the product's.
        what: is in that dtype.

    Raises:
        TypeError: naming the product, and what to do.
    """
    raise TypeError(
        f"{path or 'MatMul'}: {what} is in {text_of(dtype)}, but products in FP8 give float32, bfloat16 or float16: "
        'convert model and x, leave the region, or exempt it by te.precision(model, {"path": None}); '
        f"{REFERENCE} takes float64"
    )

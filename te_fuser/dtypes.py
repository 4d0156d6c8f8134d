"""The dtypes that values of a plan may have, in one table; what is not in it is an error wherever it is asked for."""

from __future__ import annotations

import torch

# The name in descriptions of kernels, in plans and in messages -> PyTorch's dtype.
FLOATING: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_NAMES = {dtype: name for name, dtype in FLOATING.items()}
GENERATED = (torch.float32, torch.bfloat16, torch.float16)  # those that generated kernels and products take


def text_of(dtype: torch.dtype) -> str:
    """Any dtype for people: float32, int64."""
    return str(dtype).removeprefix("torch.")


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype that a value may have.

    Raises:
        TypeError: for one that no value has.
    """
    if dtype not in _NAMES:
        raise TypeError(f"values are in {', '.join(FLOATING)}, got {text_of(dtype)}")
    return _NAMES[dtype]

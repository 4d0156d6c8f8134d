"""The dtypes that values of a plan may have, in one table; what is not in it is an error wherever it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Dtype:
    """A row of the table.

    Attributes:
        torch: PyTorch's dtype.
        cpp, cuda: an element in generated C++ and CUDA; empty: no kernel with such a tensor is generated.
        reading: rough instructions by which a CPU makes a vector of floats of a vector of these.
        computes: whether formulas take it; else an op may give it, rounded to nearest even within its finite range,
            and ops read it that say so.
    """

    torch: torch.dtype
    cpp: str = ""
    cuda: str = ""
    reading: int = 1
    computes: bool = True


# By the name in descriptions of kernels, in plans and in messages.
TABLE: dict[str, Dtype] = {
    "float32": Dtype(torch.float32, "float", "float"),
    "bfloat16": Dtype(torch.bfloat16, "te::bf16", "te::bf16", 2),
    "float16": Dtype(torch.float16, "te::f16", "te::fp16", 8),
    "float64": Dtype(torch.float64),
    "float8_e4m3fn": Dtype(torch.float8_e4m3fn, "te::e4m3", "te::e4m3", 8, computes=False),
    "float8_e5m2": Dtype(torch.float8_e5m2, "te::e5m2", "te::e5m2", 8, computes=False),
}
STORED = {name: row.torch for name, row in TABLE.items()}
FLOATING = {name: row.torch for name, row in TABLE.items() if row.computes}
FLOAT8 = {name: row.torch for name, row in TABLE.items() if not row.computes}
GENERATED = tuple(row.torch for row in TABLE.values() if row.cpp and row.computes)  # of generated kernels' arithmetic
_NAMES = {dtype: name for name, dtype in STORED.items()}


def text_of(dtype: torch.dtype) -> str:
    """Name of any dtype for people: float32, int64."""
    return str(dtype).removeprefix("torch.")


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype that a value may have; TypeError for one that no value has."""
    if dtype not in _NAMES:
        raise TypeError(f"values are in {', '.join(TABLE)}, got {text_of(dtype)}")
    return _NAMES[dtype]

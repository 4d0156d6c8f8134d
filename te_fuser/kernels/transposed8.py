"""A matrix of 8 bits turned: rows [tokens, features] as [features, tokens], with zeros up to a multiple of 16 tokens.

Products of 8 bits take what lies along what is summed (`kernels/quantized_matmul.py`). The sum of a weight's gradient
goes over tokens, that of an input's over what the layer gives: both read what was turned. The kernel's text is
`transposed8.cu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel
from te_fuser.dtypes import text_of

if TYPE_CHECKING:
    from te_fuser import _native

STEP = 16  # tokens come in multiples of so many, and features that the kernel takes
_SOURCE = Path(__file__).with_suffix(".cu")
_SIDE, _THREADS = 128, 256  # of a tile; of a block
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each turns one tile and ends
_MOST = 2**31 - STEP


def padded(tokens: int) -> int:
    """Tokens up to the next multiple of 16."""
    return -(-tokens // STEP) * STEP


def by_torch(data: torch.Tensor) -> torch.Tensor:
    """data [..., features] of 8 bits as [features, padded tokens], by PyTorch."""
    rows = data.flatten(0, -2) if data.dim() > 1 else data[None]
    turned = torch.zeros(rows.shape[1], padded(len(rows)), dtype=torch.uint8, device=data.device)
    turned[:, : len(rows)] = rows.view(torch.uint8).mT  # bytes: not every operation knows 8 bits
    return turned.view(data.dtype)


def by_kernel(data: torch.Tensor) -> torch.Tensor:
    """The same in one launch, on a GPU; plans compile the kernel.

    Raises:
        ValueError: for what `reason_not` names, and for more tokens than the kernel counts.
    """
    *leading, features = data.shape
    tokens = math.prod(leading)
    why = reason_not(features)
    if why is not None or max(tokens, features) > _MOST:
        raise ValueError(why or f"the kernel that turns bytes counts up to {_MOST}, got {tokens} rows of {features}")
    turned = data.new_empty((features, padded(tokens)))
    tiles = -(-tokens // _SIDE) * -(-features // _SIDE)
    if tiles:
        kernel = Transposed8(data.dtype).ready(data.device)
        kernel((data.contiguous(), turned), tiles, 1, 1, (tokens, features))
    return turned


def reason_not(features: int) -> str | None:
    """Why the kernel does not turn rows of so many features; None when it does."""
    return (
        f"the kernel that turns bytes takes rows of a multiple of {STEP}, not {features}" if features % STEP else None
    )


@dataclass(frozen=True)
class Transposed8(TextKernel["_native.CudaKernel"]):
    """The kernel as plans compile it beside their generated ones; the text is one for both dtypes of 8 bits."""

    dtype: torch.dtype
    name: ClassVar[str] = "transposed8"

    def text(self) -> str:
        """The CUDA text."""
        return _SOURCE.read_text()

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        from te_fuser import _native

        sources = [("tensor", 0), ("tensor", 1), ("rows", 0), ("groups", 0), *(("integer", k) for k in range(2))]
        launch = (self.name, _THREADS, 0, (1, 1, _ENDLESS, False, False), tuple(sources))
        dtypes = (text_of(self.dtype),) * 2
        return _native.CudaKernel(self.name, cubin, dtypes, (STEP, STEP), 1, (launch,), (), 0, 2, waits=True)

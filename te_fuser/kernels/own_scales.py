"""Matrices in 8 bits by a scale for each block, which follows from that, by rows and turned, on a GPU.

What products of 8 bits read lies along what they sum, so a matrix that two of them read is made by rows and turned,
from one reading. The kernel's text is `quantize_blocks.cu`; `ops/own_scales.py` says what it computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch

from te_fuser.codegen.cuda_text import CTYPES
from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.dtypes import text_of
from te_fuser.kernels.transposed8 import STEP, padded
from te_fuser.ops.matmul import as_rows
from te_fuser.ops.own_scales import Scaling

if TYPE_CHECKING:
    from te_fuser import _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIDE, _THREADS = 128, 256  # of a tile; of a block
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each does one tile and ends
FOUR = 4  # products by blocks take rows in multiples of so many
_MOST = 2**31 - _SIDE
_FOLDER = Path(__file__).parent


class Factor(NamedTuple):
    """What a product reads of a matrix: 8 bits along what it sums, and what they are multiplied by."""

    data: torch.Tensor
    inverse: torch.Tensor


def kernel_of(x: torch.dtype, dtype: torch.dtype, scaling: Scaling, wanted: str) -> QuantizeBlocks:
    """What `quantize_blocks` launches."""
    square = scaling.block is not None and scaling.block[0] > 1
    return QuantizeBlocks(x, dtype, wanted, square, scaling.power_of_two, scaling.epsilon)


def quantize_blocks(x: torch.Tensor, dtype: torch.dtype, scaling: Scaling, wanted: str) -> tuple[Factor, Factor]:
    """x [.., features] by a scale for each 1 x 128 or 128 x 128 numbers, in one launch; plans compile the kernel.

    Args:
        wanted: "rows", "turned" or "both"; the other one is then empty.

    Returns:
        By rows, [.., features], or [tokens up to a multiple of 16, features] where tokens are no multiple of 4; and
        turned, [features, tokens up to a multiple of 16]. The scales lie as `_native.CudaMatmul` takes them.
    """
    rows = readable(x)
    (tokens, features), square = rows.shape, scaling.block is not None and scaling.block[0] > 1
    room, shape = (tokens, x.shape) if tokens % FOUR == 0 else (padded(tokens), (padded(tokens), features))
    new = rows.new_empty if room == tokens else rows.new_zeros
    data = new(shape if wanted != "turned" else 0, dtype=dtype)
    turned = rows.new_empty((features, padded(tokens)) if wanted != "rows" else 0, dtype=dtype)
    inverses = [
        new(_scales_of(*size, square) if made.numel() else (0, 0), dtype=torch.float32)
        for made, size in ((data, (room, features)), (turned, (features, tokens)))
    ]
    if tiles := _tiles(rows):
        kernel = kernel_of(x.dtype, dtype, scaling, wanted)
        leads = tuple([numbers.shape[1] for numbers in inverses])
        kernel.ready(x.device)((rows, data, turned, *inverses), tiles, 1, 1, (tokens, features, *leads))
    return Factor(data, inverses[0]), Factor(turned, inverses[1])


def unpacked(made: torch.Tensor, features: int) -> Factor:
    """A matrix as a generated kernel makes it by blocks, [.., features and room for their scales]."""
    *leading, _ = made.shape
    tokens, flat = math.prod(leading), made.view(-1)
    data, inverse = flat[: tokens * features], flat[tokens * features :]
    return Factor(data.view(*leading, features), inverse.view(torch.float32).view(_scales_of(tokens, features, False)))


def unpacked_turned(made: torch.Tensor, tokens: int) -> Factor:
    """The same, turned: [features, tokens up to a multiple of 16 and room for their scales]."""
    features, flat = len(made), made.view(-1)
    data, inverse = flat[: features * padded(tokens)], flat[features * padded(tokens) :]
    scales = inverse.view(torch.float32).view(_scales_of(features, tokens, False))
    return Factor(data.view(features, padded(tokens)), scales)


def _scales_of(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """The shape of the scales of a factor with so many rows of so many numbers."""
    blocks = -(-columns // _SIDE)
    return (-(-rows // _SIDE), -(-blocks // FOUR) * FOUR) if square else (blocks, rows)


def readable(x: torch.Tensor) -> torch.Tensor:
    """x as rows that the kernels can read.

    Raises:
        ValueError: for features that are no multiple of 16, and for more rows than the kernels count.
    """
    rows = as_rows(x.detach())
    if rows.shape[1] % STEP or max(rows.shape) > _MOST:
        raise ValueError(
            f"the kernels that quantize take features in multiples of {STEP} and up to {_MOST} rows, got "
            f"{list(rows.shape)}"
        )
    if rows.is_contiguous() and rows.data_ptr() % STEP == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


def _tiles(rows: torch.Tensor) -> int:
    return -(-rows.shape[0] // _SIDE) * -(-rows.shape[1] // _SIDE)


@dataclass(frozen=True)
class QuantizeBlocks(TextKernel["_native.CudaKernel"]):
    """The kernel that quantizes by blocks.

    Attributes:
        dtype, narrow: of the matrix, and the 8 bits.
        wanted: "rows", "turned" or "both".
        square: whether a block is 128 x 128, else 128 numbers of a row.
        power_of_two, epsilon: as `Scaling` has them.
    """

    dtype: torch.dtype
    narrow: torch.dtype
    wanted: str = "both"
    square: bool = False
    power_of_two: bool = True
    epsilon: float = 0.0
    name: ClassVar[str] = "quantize_blocks"

    def text(self) -> str:
        """The CUDA text."""
        flags = {"kSquare": self.square, "kPowerOfTwo": self.power_of_two}
        flags |= {"kByRows": self.wanted != "turned", "kTurned": self.wanted != "rows"}
        lines = ['#include "te_cuda_blocks.cuh"', "", f"using Element = {CTYPES[text_of(self.dtype)]};"]
        lines += [f"using Narrow = {CTYPES[text_of(self.narrow)]};"]
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
        most = torch.finfo(self.narrow).max
        lines += [f"constexpr float kMost = {most}f, kEpsilon = {float(self.epsilon)!r}f;", ""]
        return "\n".join([*lines, (_FOLDER / f"{self.name}.cu").read_text()])

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        narrow, number = (text_of(self.narrow), STEP), ("float32", 4)
        tensors = [(text_of(self.dtype), STEP), narrow, narrow, number, number]
        tile = _SIDE * _SIDE * (self.dtype.itemsize + (self.wanted != "rows"))
        return over_rows(self.name, cubin, tensors, 1, 4, _THREADS, blocks=_ENDLESS, shared_bytes=tile)

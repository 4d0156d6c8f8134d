"""Matrices in 8 bits by a scale for each block, which follows from that, by rows and turned, on a GPU.

What products of 8 bits read lies along what they sum, so a matrix that two of them read is made by rows and turned,
from one reading. The kernel's text is `quantize_blocks.cu`; `ops/own_scales.py` says what it computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_fuser.codegen.cuda_text import CTYPES
from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.dtypes import text_of
from te_fuser.kernels.transposed8 import STEP, padded
from te_fuser.ops.own_scales import Scaling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from te_fuser import _native

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIDE, _THREADS = 128, 256  # of a tile; of a block
_ENDLESS = 1 << 20  # blocks of a multiprocessor, one after the other: each does one tile and ends
FOUR = 4  # products by blocks take rows in multiples of so many
_MOST = 2**31 - _SIDE
_FOLDER = Path(__file__).parent


# What a product reads of a matrix: 8 bits along what it sums, and what they are multiplied by.
Factor = tuple[torch.Tensor, torch.Tensor]


def kernel_of(x: torch.dtype, dtype: torch.dtype, scaling: Scaling, wanted: str) -> QuantizeBlocks:
    """Kernel that makes a matrix in 8 bits of one in x, by rows, turned or both."""
    square = scaling.block is not None and scaling.block[0] > 1
    return QuantizeBlocks(x, dtype, wanted, square, scaling.power_of_two, scaling.epsilon)


class BlocksOf:
    """f(x [.., features]) -> x by a scale for each 1 x 128 or 128 x 128 numbers, by rows and turned, in one launch.

    By rows it is [.., features], or [tokens up to a multiple of 16, features] where tokens are no multiple of 4;
    turned, [features, tokens up to a multiple of 16]. The scales lie as `_native.CudaMatmul` takes them. What the
    kernel does not make is empty.

    Args:
        kernel: that for x's dtype, which plans compile.
    """

    __slots__ = ("_by_rows", "_kernel", "_ready", "_turned")

    def __init__(self, kernel: QuantizeBlocks) -> None:
        self._kernel, self._ready = kernel, dict[torch.device, Any]()
        self._by_rows, self._turned = kernel.wanted != "turned", kernel.wanted != "rows"

    def __call__(self, x: torch.Tensor) -> tuple[Factor, Factor]:
        *leading, features = shape = x.shape
        tokens = math.prod(leading)
        rows = _readable(x, tokens)
        behind, whole = padded(tokens), tokens % FOUR == 0
        new = rows.new_empty if whole else rows.new_zeros
        sizes, room = (shape, tokens) if whole else ((behind, features), behind)
        by_rows = self._factor(new, sizes, room, features) if self._by_rows else self._nothing(rows)
        turned = self._factor(new, (features, behind), features, tokens) if self._turned else self._nothing(rows)
        if tiles := -(-tokens // _SIDE) * -(-features // _SIDE):
            tensors, leads = (
                (rows, by_rows[0], turned[0], by_rows[1], turned[1]),
                (by_rows[1].shape[1], turned[1].shape[1]),
            )
            self._on(x.device)(tensors, tiles, 1, 1, (tokens, features, *leads))
        return by_rows, turned

    def _factor(self, new: Callable[..., torch.Tensor], sizes: Sequence[int], rows: int, columns: int) -> Factor:
        """Memory for rows of so many numbers, and for their scales."""
        scales = _scales_of(rows, columns, self._kernel.square) if rows and columns else (0, 0)
        return new(sizes, dtype=self._kernel.narrow), new(scales, dtype=torch.float32)

    def _nothing(self, like: torch.Tensor) -> Factor:
        """A factor that is not made."""
        return like.new_empty(0, dtype=self._kernel.narrow), like.new_empty((0, 0), dtype=torch.float32)

    def _on(self, device: torch.device) -> Any:
        found = self._ready.get(device)
        if found is None:
            found = self._ready[device] = self._kernel.ready(device)
        return found


def unpacked(made: torch.Tensor, columns: int, turned: bool = False) -> Factor:
    """A matrix as a generated kernel makes it by blocks, [.., features and room for their scales].

    Args:
        columns: features; turned, tokens, which come up to a multiple of 16.
    """
    *leading, _ = made.shape
    rows, room, flat = math.prod(leading), padded(columns) if turned else columns, made.view(-1)
    data, inverse = flat[: rows * room], flat[rows * room :]
    return data.view(*leading, room), inverse.view(torch.float32).view(_scales_of(rows, columns, False))


def _scales_of(rows: int, columns: int, square: bool) -> tuple[int, int]:
    """The shape of the scales of a factor with so many rows of so many numbers."""
    blocks = -(-columns // _SIDE)
    return (-(-rows // _SIDE), -(-blocks // FOUR) * FOUR) if square else (blocks, rows)


def _readable(x: torch.Tensor, tokens: int) -> torch.Tensor:
    """x as the kernel can read it.

    Raises:
        ValueError: for features that are no multiple of 16, and for more rows than the kernel counts.
    """
    features = x.shape[-1]
    if features % STEP or max(tokens, features) > _MOST:
        raise ValueError(
            f"the kernels that quantize take features in multiples of {STEP} and up to {_MOST} rows, got "
            f"{[tokens, features]}"
        )
    if x.is_contiguous() and x.data_ptr() % STEP == 0:
        return x
    return x.detach().clone(memory_format=torch.contiguous_format)


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

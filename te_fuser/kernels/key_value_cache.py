"""Keys and values of packed heads to their positions in caches, and the queries, in one pass on a GPU.

The kernel's text is `key_value_cache.cu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.kernels.strided import as_one, reach

if TYPE_CHECKING:
    from te_fuser import _native

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS, _BLOCKS, _MOST_TILES = 128, 8, 16
_ACCESS = 16  # bytes that a thread moves at once
_DTYPES = {torch.bfloat16: ("bfloat16", 0x7FC07FC0), torch.float16: ("float16", 0x7E007E00)}
_DTYPES[torch.float32] = ("float32", 0x7FC00000)
WHOLE = {torch.int32: ("int32", "int"), torch.int64: ("int64", "long long")}


def reason_not(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take such heads; None when it does."""
    if dtype not in _DTYPES:
        return f"it takes {', '.join(name for name, _ in _DTYPES.values())}, there is {dtype}"
    if head_dim * dtype.itemsize % _ACCESS:
        return f"it moves {_ACCESS} bytes at once, and a head has {head_dim * dtype.itemsize}"
    return None


@dataclass(frozen=True)
class CacheWrite(TextKernel["_native.CudaKernel"]):
    """The kernel for heads of one kind; `whole` is the dtype of starts and counts."""

    head_dim: int
    kv_heads: int
    per_group: int
    packing: str
    dtype: torch.dtype
    whole: torch.dtype
    name: ClassVar[str] = "key_value_cache"

    @property
    def pieces(self) -> int:
        """Accesses of a head."""
        return self.head_dim * self.dtype.itemsize // _ACCESS

    @property
    def tiles(self) -> int:
        """Blocks that a row takes."""
        vectors = self.kv_heads * (self.per_group + 2) * self.pieces
        return min(-(-vectors // _THREADS), _MOST_TILES)

    def text(self) -> str:
        """The CUDA text: the constants, and `key_value_cache.cu`."""
        numbers = {"Groups": self.kv_heads, "PerGroup": self.per_group, "Pieces": self.pieces, "Tiles": self.tiles}
        lines = ['#include "te_cuda.cuh"', "", f"using Whole = {WHOLE[self.whole][1]};"]
        lines += [f"constexpr int k{name} = {number};" for name, number in numbers.items()]
        lines += [f"constexpr bool kBlocked = {str(self.packing == 'blocked').lower()};"]
        lines += [
            f"constexpr unsigned kNan = 0x{_DTYPES[self.dtype][1]:08X}u;",
            f"constexpr int kThreads = {_THREADS};",
        ]
        return "\n".join([*lines, "", _SOURCE.read_text()])

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it: x, starts, counts, both caches, y."""
        stored, (whole, _) = _DTYPES[self.dtype][0], WHOLE[self.whole]
        tensors = [(stored, _ACCESS), *[(whole, self.whole.itemsize)] * 2, *[(stored, _ACCESS)] * 3]
        return over_rows(self.name, cubin, tensors, 3, 6, _THREADS, blocks=_BLOCKS)


def put(
    kernel: CacheWrite,
    x: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    starts: torch.Tensor,
    counts: torch.Tensor,
    sequence_first: bool,
) -> torch.Tensor:
    """Write keys and values of x into the caches, which have equal strides; gives the queries.

    Args:
        x: packed heads [S, B, F], or [B, S, F] if not `sequence_first`.
        key_cache, value_cache: [L + 1, B, G * D], or [B, L + 1, G * D].
        starts, counts: [B], as `ops.KeyValueCache` takes them.
    """
    features = kernel.kv_heads * kernel.per_group * kernel.head_dim
    y = x.new_empty(*x.shape[:2], features)
    if not x.numel():
        return y
    sequence = 1 - int(sequence_first)
    steps = [step * x.element_size() // _ACCESS for step in key_cache.stride()]
    position_step, sample_step = steps[sequence], steps[1 - sequence]
    samples, positions = x.shape[1 - sequence], x.shape[sequence]
    numbers = (
        samples, positions, int(sequence_first), key_cache.shape[sequence] - 1, position_step, sample_step
    )  # fmt: skip
    caches = (as_one(cache, reach(cache)) for cache in (key_cache, value_cache))
    read = (x.contiguous(), starts.contiguous(), counts.contiguous())
    kernel.ready(x.device)((*read, *caches, y), samples * positions * kernel.tiles, 1, 1, numbers)
    for cache in (key_cache, value_cache):
        if not cache.is_inference():
            torch.autograd.graph.increment_version(cache)
    return y


def can_reach(cache: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether the kernel can write into caches as they lie."""
    size = cache.element_size()
    steps = [step * size for step in cache.stride()[:-1]]
    whole = cache.stride(-1) == 1 and not any(step % _ACCESS or step // _ACCESS >= 2**31 for step in steps)
    return whole and cache.stride() == other.stride() and not any(t.data_ptr() % _ACCESS for t in (cache, other))

"""Attention of one query a sample to keys and values that lie by position, such as caches, on a GPU; no backward.

A sample's keys are gone over in parts, by as many blocks as the GPU has room for, and then merged. Lengths stay on the
device: samples whose lengths cannot be get NaN. The kernels' text is `one_query.cu`.

Shapes in this file: B samples, K positions of keys, G heads of keys and values, H of queries, D features of each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel
from te_fuser.kernels.strided import as_one, reach, readable

if TYPE_CHECKING:
    from te_fuser import _native

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS, _BLOCKS = 128, 8
_VECTOR, _MOST_WIDTH, _MOST_HEADS = 8, 256, 8
_LEAST_KEYS, _MOST_PARTS = 32, 128  # of a part: a block reads about as many at once; of a sample's keys
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def reason_not(head_dim: int, dtype: torch.dtype) -> str | None:
    """Why the kernel does not take such heads; None when it does."""
    if dtype not in _DTYPES:
        return f"it takes {' and '.join(_DTYPES.values())}, there is {dtype}"
    if head_dim % _VECTOR or head_dim > _MOST_WIDTH:
        return f"it takes heads of a multiple of {_VECTOR} features up to {_MOST_WIDTH}, these have {head_dim}"
    return None


@dataclass(frozen=True)
class OneQuery(TextKernel["_native.CudaKernel"]):
    """The kernel for heads of one kind.

    Args:
        left: how many keys a query sees before the last; None: all.
    """

    head_dim: int
    kv_heads: int
    per_group: int
    dtype: torch.dtype
    scale: float
    left: int | None = None
    name: ClassVar[str] = "one_query"

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return -(-self.per_group // self.turns)

    @property
    def turns(self) -> int:
        """Blocks that the query heads of a group take."""
        return -(-self.per_group // _MOST_HEADS)

    def text(self) -> str:
        """The CUDA text: the constants, and `one_query.cu`."""
        lanes = 1 << (self.head_dim // _VECTOR - 1).bit_length()
        numbers = {
            "Width": self.head_dim,
            "Groups": self.kv_heads,
            "PerGroup": self.per_group,
            "Heads": self.heads,
            "Turns": self.turns,
            "Lanes": lanes,
            "Deep": 4 if self.heads <= _MOST_HEADS // 2 else 2,
            "Left": -1 if self.left is None else self.left,
            "Threads": _THREADS,
        }
        return "\n".join(
            [
                '#include "te_cuda.cuh"',
                "",
                f"using Element = te::{'bf16' if self.dtype == torch.bfloat16 else 'fp16'};",
                *(f"constexpr int k{name} = {number};" for name, number in numbers.items()),
                f"constexpr float kScale = {self.scale * math.log2(math.e)!r}f;",
                "",
                _SOURCE.read_text(),
            ]
        )

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it: queries, keys, values, both lengths, parts, the output."""
        from te_fuser import _native

        stored, grid = _DTYPES[self.dtype], (1, 1, _BLOCKS, False, False)
        tensors = [(stored, 16)] * 3 + [("int32", 4)] * 2 + [("float32", 4), (stored, 2)]
        rows = [("rows", 0), ("groups", 0)]
        first = [("tensor", k) for k in range(6)] + rows + [("integer", k) for k in range(5)]
        second = [("tensor", 5), ("tensor", 6), *rows, ("integer", 0)]
        launches = tuple(
            (name, _THREADS, 0, grid, tuple(arguments))
            for name, arguments in (("one_query_parts", first), ("one_query_merged", second))
        )
        dtypes, alignments = zip(*tensors, strict=True)
        return _native.CudaKernel(self.name, cubin, dtypes, alignments, 5, launches, (), 0, 5, waits=True)


@functools.cache
def _room(device: torch.device, heads: int) -> int:
    """Blocks of so many heads that run at once and keep a GPU busy: one more would run alone, after them."""
    resident = 4 if heads < 4 else 3  # of a multiprocessor; the fastest on an H200 for 1, 4 and 8 heads
    return resident * torch.cuda.get_device_properties(device).multi_processor_count


def attend(
    kernel: OneQuery,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sequence_first: bool,
    lengths: torch.Tensor | None = None,
    key_lengths: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T scale) v over the keys of each sample, as large as `query`.

    Args:
        query: [1, B, H * D], or [B, 1, H * D] if not `sequence_first`.
        key, value: [K, B, G * D], or [B, K, G * D].
        lengths: whole numbers [B], 0 where a sample has no query: its row is 0.
        key_lengths: whole numbers [B], how many keys there are; None: all. The query stands at the last.
    """
    query, out = query.contiguous(), torch.empty_like(query, memory_format=torch.contiguous_format)
    samples, positions = query.shape[int(sequence_first)], key.shape[1 - int(sequence_first)]
    if not out.numel():
        return out
    key = readable(key, _VECTOR)
    value = value if value.stride() == key.stride() else value.contiguous()
    if value.stride() != key.stride():
        key = key.contiguous()
    steps = [step // _VECTOR for step in key.stride()]
    position_step, sample_step = steps[:2] if sequence_first else (steps[1], steps[0])
    items = samples * kernel.kv_heads * kernel.turns
    room = _room(query.device, kernel.heads)
    splits = max(1, min(room // items, -(-positions // _LEAST_KEYS), _MOST_PARTS))
    parts = torch.empty(items * splits * kernel.heads * (kernel.head_dim + 2), dtype=torch.float32, device=query.device)
    counts = [None if t is None else t.to(torch.int32).contiguous() for t in (lengths, key_lengths)]
    given = sum(1 << k for k, t in enumerate(counts) if t is not None)
    some = next((t for t in counts if t is not None), parts.view(torch.int32))
    read = (query, as_one(key, reach(key)), as_one(value, reach(value)), *(some if t is None else t for t in counts))
    numbers = (splits, positions, position_step, sample_step, given)
    kernel.ready(query.device)((*read, parts, out), items * splits, 1, 1, numbers)
    return out

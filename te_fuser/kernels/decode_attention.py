"""Decoding on a GPU: keys and values of packed heads put into caches, and attention of one query a sample to them.

A sample's keys are gone over in parts, by as many blocks as the GPU has room for, and then merged; there is no
backward. Lengths stay on the device: samples whose lengths cannot be get NaN. The kernels' texts are
`key_value_cache.cu` and `one_query.cu`.

Shapes in this file: B samples, K positions of keys, G heads of keys and values, H of queries, D features of each.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, constants_of, over_rows
from te_fuser.kernels.heads_pass import as_one, reach, readable

_THREADS, _BLOCKS, _MOST_TILES = 128, 8, 16
_ACCESS = 16  # bytes that a thread moves at once
_CACHE_DTYPES = {torch.bfloat16: ("bfloat16", 0x7FC07FC0), torch.float16: ("float16", 0x7E007E00)}
_CACHE_DTYPES[torch.float32] = ("float32", 0x7FC00000)
WHOLE = {torch.int32: ("int32", "int"), torch.int64: ("int64", "long long")}


def why_not_cached(head_dim: int, dtype: torch.dtype) -> str | None:
    """Reason for which the kernel does not take such heads; None when it does."""
    if dtype not in _CACHE_DTYPES:
        return f"it takes {', '.join(name for name, _ in _CACHE_DTYPES.values())}, there is {dtype}"
    if head_dim * dtype.itemsize % _ACCESS:
        return f"it moves {_ACCESS} bytes at once, and a head has {head_dim * dtype.itemsize}"
    return None


@dataclass(frozen=True)
class CacheWrite(TextKernel[_native.CudaKernel]):
    """The kernel for heads of one kind; `whole` is the dtype of starts and counts."""

    head_dim: int
    kv_heads: int
    per_group: int
    packing: str
    dtype: torch.dtype
    whole: torch.dtype
    name: ClassVar[str] = "key_value_cache"
    source: ClassVar[Path] = Path(__file__).with_name("key_value_cache.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    @property
    def pieces(self) -> int:
        """Accesses of a head."""
        return self.head_dim * self.dtype.itemsize // _ACCESS

    @property
    def tiles(self) -> int:
        """Blocks that a row takes."""
        vectors = self.kv_heads * (self.per_group + 2) * self.pieces
        return min(-(-vectors // _THREADS), _MOST_TILES)

    def constants(self) -> list[str]:
        numbers = {"kGroups": self.kv_heads, "kPerGroup": self.per_group, "kPieces": self.pieces, "kTiles": self.tiles}
        return [
            *constants_of({"Whole": WHOLE[self.whole][1]}, numbers, {"kBlocked": self.packing == "blocked"}),
            f"constexpr unsigned kNan = 0x{_CACHE_DTYPES[self.dtype][1]:08X}u;",
            f"constexpr int kThreads = {_THREADS};",
        ]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The native kernel of x, starts, counts, both caches, y."""
        stored, (whole, _) = _CACHE_DTYPES[self.dtype][0], WHOLE[self.whole]
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
    """True where the kernel can write into caches as they lie."""
    size = cache.element_size()
    steps = [step * size for step in cache.stride()[:-1]]
    whole = cache.stride(-1) == 1 and not any(step % _ACCESS or step // _ACCESS >= 2**31 for step in steps)
    return whole and cache.stride() == other.stride() and not any(t.data_ptr() % _ACCESS for t in (cache, other))


_VECTOR, _MOST_WIDTH, _MOST_HEADS = 8, 256, 8
_LEAST_KEYS, _MOST_PARTS = 32, 128  # of a part: a block reads about as many at once; of a sample's keys
_QUERY_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


def why_not_one_query(head_dim: int, dtype: torch.dtype) -> str | None:
    """Reason for which the kernel does not take such heads; None when it does."""
    if dtype not in _QUERY_DTYPES:
        return f"it takes {' and '.join(_QUERY_DTYPES.values())}, there is {dtype}"
    if head_dim % _VECTOR or head_dim > _MOST_WIDTH:
        return f"it takes heads of a multiple of {_VECTOR} features up to {_MOST_WIDTH}, these have {head_dim}"
    return None


@dataclass(frozen=True)
class OneQuery(TextKernel[_native.CudaKernel]):
    """The kernel for heads of one kind; a query sees `left` keys before the last, or all."""

    head_dim: int
    kv_heads: int
    per_group: int
    dtype: torch.dtype
    scale: float
    left: int | None = None
    name: ClassVar[str] = "one_query"
    source: ClassVar[Path] = Path(__file__).with_name("one_query.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    @property
    def heads(self) -> int:
        """Query heads of a block."""
        return -(-self.per_group // self.turns)

    @property
    def turns(self) -> int:
        """Blocks that the query heads of a group take."""
        return -(-self.per_group // _MOST_HEADS)

    def constants(self) -> list[str]:
        lanes = 1 << (self.head_dim // _VECTOR - 1).bit_length()
        numbers = {
            "kWidth": self.head_dim,
            "kGroups": self.kv_heads,
            "kPerGroup": self.per_group,
            "kHeads": self.heads,
            "kTurns": self.turns,
            "kLanes": lanes,
            "kDeep": 4 if self.heads <= _MOST_HEADS // 2 else 2,
            "kLeft": -1 if self.left is None else self.left,
            "kThreads": _THREADS,
        }
        types = {"Element": f"te::{'bf16' if self.dtype == torch.bfloat16 else 'fp16'}"}
        scale = f"constexpr float kScale = {self.scale * math.log2(math.e)!r}f;"
        return [*constants_of(types, numbers, {}), scale]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The native kernel of queries, keys, values, both lengths, parts, the output."""
        stored, grid = _QUERY_DTYPES[self.dtype], (1, 1, _BLOCKS, False, False)
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
    """Blocks of so many heads that run at once and fill a GPU."""
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

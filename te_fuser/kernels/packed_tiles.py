"""Gradients of queries, keys and values in 8 bits, packed by rows and turned, in one pass; their columns added up.

    rows = quantize(dq | dk | dv), turned = rows^T, dbias = the sums of columns

As `packed_heads`, where nothing turns by its position and products read both layouts; by one scale that is given, or by
blocks of 128 numbers. The kernel's text is `packed_tiles.cu`; its tiles are those of generated kernels that store so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, constants_of
from te_fuser.codegen.cuda_text import CTYPES, EVERY_ROW, FINISH_THREADS
from te_fuser.codegen.description import BLOCK, TOKENS, padded, sizes_in_blocks
from te_fuser.dtypes import name_of
from te_fuser.kernels.heads_pass import Scaled, as_one, readable
from te_fuser.kernels.packed_heads import Parts, Rows, rows_of_parts
from te_fuser.ops.attention.heads import PackedHeads

_ACCESS = 16  # bytes
_THREADS, _LANES, _TILE_ROWS = 256, 8, 128
_BLOCKS, _WAITING_BLOCKS = 4, 3  # of a multiprocessor; where a tile waits in shared memory
_FORMS_KEPT = 256


def why_not(heads: PackedHeads, dtype: torch.dtype, in_blocks: bool = False) -> str:
    """Reason for which the kernel does not pack these heads; empty when it does."""
    vector = _ACCESS // dtype.itemsize
    if in_blocks and heads.features % TOKENS:
        return f"{heads.features} features are no multiple of {TOKENS}"
    return "" if heads.head_dim % vector == 0 else f"heads of {heads.head_dim} features are no vectors of {vector}"


@dataclass(frozen=True)
class PackedTiles(TextKernel[_native.CudaKernel]):
    """Case that the text of the kernel is written for.

    `stored` are 8 bits, `in_blocks` with a scale for each 128 numbers, as `codegen.description.Store` has these.
    """

    heads: PackedHeads
    dtype: torch.dtype
    stored: torch.dtype
    sums: torch.dtype | None = None
    in_blocks: bool = False
    name: ClassVar[str] = "packed_tiles"
    source: ClassVar[Path] = Path(__file__).with_suffix(".cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda_blocks.cuh",)

    @property
    def vector(self) -> int:
        """Neighbours that a thread takes at once."""
        return _ACCESS // self.dtype.itemsize

    @property
    def tiles(self) -> int:
        """Blocks side by side in a row."""
        return -(-self.heads.features // (BLOCK if self.in_blocks else _LANES * self.vector))

    @property
    def blocks(self) -> int:
        """Blocks of a multiprocessor; by blocks, numbers wait in shared memory."""
        if not self.in_blocks:
            return _BLOCKS
        return _WAITING_BLOCKS if self.dtype.itemsize == 2 else 2

    def constants(self) -> list[str]:
        heads = self.heads
        types = {"Element": self.dtype, "SumElement": self.sums or self.dtype, "OutElement": self.stored}
        integers = {
            "kQueries": heads.heads, "kGroups": heads.kv_heads, "kHeadDim": heads.head_dim,
            "kBlocks": self.blocks, "kTiles": self.tiles,
        }  # fmt: skip
        flags = {
            "kBlocked": heads.packing == "blocked",
            "kSamplesFirst": heads.layout == "batch_first",
            "kSums": self.sums is not None,
            "kInBlocks": self.in_blocks,
        }
        names = {name: CTYPES[name_of(dtype)] for name, dtype in types.items()}
        return constants_of(names, integers, flags)

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The native kernel of three parts, scale and amax; rows, turned, sums."""
        stored = name_of(self.stored)
        scaled = 0 if self.in_blocks else 2
        tensors = [(name_of(self.dtype), _ACCESS)] * 3 + [("float32", 4)] * scaled
        tensors += [(stored, self.vector), (stored, 16)]
        read, made = 3 + scaled, 5 + scaled  # how many tensors; what is not there is never read
        sums = [("tensor", made), ("partial", 0)] if self.sums else [("tensor", read)] * 2
        # By blocks of numbers they walk over all rows; else none does, or with sums over four tiles.
        places = self.blocks * (1 if self.in_blocks else EVERY_ROW)
        grid = (self.tiles, _TILE_ROWS, places, False, self.sums is not None)
        counts = [("rows", 0), ("batch_size", 0), ("groups", 0)]
        given = [*[("tensor", k) for k in range(read)], *[("tensor", read)] * (2 - scaled), ("tensor", read)]
        arguments = (*given, ("tensor", read + 1), *sums, *counts, *[("integer", k) for k in range(10)])
        waiting = BLOCK * _TILE_ROWS * (self.dtype.itemsize + 1) if self.in_blocks else 0
        launches: list[_native.CudaLaunch] = [(self.name, _THREADS, waiting, grid, arguments)]
        if self.sums:
            tensors.append((name_of(self.sums), self.sums.itemsize))
            finish = (("partial", 0), ("tensor", made), ("groups", 0))
            launches.append((f"{self.name}_finish", FINISH_THREADS, 0, (-(-self.heads.features // 32), 0), finish))
        dtypes, alignments = zip(*tensors, strict=True)
        widths = (self.heads.features,) if self.sums else ()
        how = dtypes, alignments, read, tuple(launches), widths, 0, 10
        return _native.CudaKernel(self.name, cubin, *how, waits=True)


Packed8 = tuple[torch.Tensor, torch.Tensor, "torch.Tensor | None"]


class TilePacking:
    """Packs the gradients of q, k and v in 8 bits, in both layouts."""

    def __init__(self, heads: PackedHeads) -> None:
        self._heads = heads
        self._known: dict[Hashable, tuple[_native.CudaKernel, Rows]] = {}

    def __call__(
        self,
        parts: Parts,
        scaled: Scaled | torch.dtype,
        grouped: Callable[..., Parts] | None = None,
        *,
        sums: torch.dtype | None = None,
    ) -> Packed8:
        """Rows in the layout of the heads, the same turned [F, tokens, padded to 16], and the sums [F] or None.

        As `packed_heads.Packing`; `scaled` may be the dtype of 8 bits by blocks, behind which the scales then lie.
        """
        q, k, v = parts
        stored, in_blocks = (scaled, True) if isinstance(scaled, torch.dtype) else (scaled.dtype, False)
        form = q.shape, k.shape, q.stride(), k.stride(), v.stride(), q.dtype, q.device, stored, in_blocks, sums
        known = self._known.get(form)
        if known is not None:
            return _run(*known, [q, k, v], scaled, sums)
        given = parts if grouped is None else grouped(*parts)
        kernel = PackedTiles(self._heads, q.dtype, stored, sums, in_blocks)
        sources = [readable(part, kernel.vector) for part in given]
        ready = kernel.ready(q.device), rows_of_parts(self._heads, sources, kernel.vector)
        if all(source is part for source, part in zip(sources, given, strict=True)):
            if len(self._known) >= _FORMS_KEPT:
                self._known.clear()
            self._known[form] = ready
        return _run(*ready, sources, scaled, sums)


def _run(
    kernel: _native.CudaKernel,
    rows: Rows,
    sources: list[torch.Tensor],
    scaled: Scaled | torch.dtype,
    sums: torch.dtype | None,
) -> Packed8:
    """Allocate, and launch on tensors that can be read where they lie."""
    first, features = sources[0], rows.out[2]
    if isinstance(scaled, torch.dtype):
        out = first.new_empty((*rows.out[:2], sizes_in_blocks("blocks", rows.count, features)[1]), dtype=scaled)
        turned = first.new_empty(sizes_in_blocks("transposed_blocks", rows.count, features), dtype=scaled)
        numbers = []
    else:
        out = first.new_empty(rows.out, dtype=scaled.dtype)
        turned = first.new_empty((features, padded(rows.count)), dtype=scaled.dtype)
        numbers = [scaled.scale, scaled.amax]
    added = None if sums is None else first.new_empty(features, dtype=sums)
    if not rows.count:
        return out, turned, None if added is None else added.zero_()
    # The native runtime takes contiguous tensors alone.
    tensors = [as_one(x, n) for x, n in zip(sources, rows.reaches, strict=True)]
    tensors += [*numbers, out, turned, *([] if added is None else [added])]
    kernel(tuple(tensors), rows.count, 1, rows.samples, rows.steps[2:])
    return out, turned, added

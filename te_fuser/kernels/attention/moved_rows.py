"""Tokens of samples whose padding lies between or before them, moved together on the device, and back.

Most masks of padding hide the end of each sample, which kernels are told by lengths. Only a device knows which mask
does, and nobody waits for it. So samples are told apart there, and what is done for those with gaps costs little where
there are none. The kernels' text is `moved_rows.cu`.

Shapes in this file: B samples, S positions, K keys, T = B * S rows, F features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel, over_rows
from te_fuser.kernels.strided import as_one, reach, readable

if TYPE_CHECKING:
    from te_fuser import _native

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS, _BLOCKS, _BEHIND = 256, 8, 256
_ACCESS = 16  # bytes that a thread moves at once
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Tokens:
    """What a mask of padding says of one side.

    Attributes:
        lengths: int32 [B], of samples without gaps on any side: how many tokens they begin with; 0 of the others.
        offsets: int32 [B + 1], where tokens of samples with gaps begin once they are moved; those without have none.
        places: int32 [B, S], the positions of tokens, in order.
    """

    lengths: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor


Found = tuple[Tokens, Tokens | None]


class CompactByTorch:
    """Both by PyTorch, which moves all rows."""

    @staticmethod
    def find(hidden: torch.Tensor | None, key_hidden: torch.Tensor | None, positions: int, keys: int | None) -> Found:
        """The tokens of queries and of keys, by masks [B, 1, 1, S] and [B, 1, 1, K]; of packed heads `keys` is None."""
        sides = [(hidden, positions)] + ([] if keys is None else [(key_hidden, keys)])
        some = hidden if hidden is not None else key_hidden
        assert some is not None
        given = [some.new_zeros(len(some), n) if mask is None else mask.view(len(some), n) for mask, n in sides]
        counts = [(~mask).sum(-1, dtype=torch.int32) for mask in given]
        rows = [torch.arange(n, device=some.device) for _, n in sides]
        gaps = [((row < count[:, None]) & mask).any(-1) for row, count, mask in zip(rows, counts, given, strict=True)]
        moves = functools.reduce(torch.logical_or, gaps)
        places = [torch.sort(mask, dim=-1, stable=True).indices.int() for mask in given]
        found = [
            Tokens(count.masked_fill(moves, 0), _offsets(count.masked_fill(~moves, 0)), place)
            for count, place in zip(counts, places, strict=True)
        ]
        return found[0], found[1] if len(found) > 1 else None

    @staticmethod
    def together(x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Rows of x [B, S, F] as [T, F]: tokens of samples with gaps, and behind them zeros."""
        rows = x.flatten(0, 1)
        return torch.cat((rows, rows.new_zeros(1, rows.shape[1])))[_rows_of(tokens)]

    @staticmethod
    def back(rows: torch.Tensor, tokens: Tokens, x: torch.Tensor) -> None:
        """Rows [T, G * P] of such tokens to where they stand in x [B, S, G, P], whose pieces P may lie apart."""
        all_and_one = torch.cat((x.flatten(2).flatten(0, 1), rows[:1]))
        x.copy_(all_and_one.index_copy(0, _rows_of(tokens), rows)[:-1].view(x.shape))


def _rows_of(tokens: Tokens) -> torch.Tensor:
    """The row [B * S] of each moved token, and B * S of what is none, [T]."""
    samples, positions = tokens.places.shape
    at = torch.arange(samples * positions, device=tokens.places.device)
    sample = torch.bucketize(at, tokens.offsets[1:], right=True).clamp(max=samples - 1)
    place = (at - tokens.offsets[sample]).clamp(0, positions - 1)
    rows = sample * positions + tokens.places[sample, place]
    return rows.masked_fill(at >= tokens.offsets[-1], len(at))


def _offsets(counts: torch.Tensor) -> torch.Tensor:
    """[.., B] -> [.., B + 1], from 0 on."""
    return torch.nn.functional.pad(counts.cumsum(-1, dtype=torch.int32), (1, 0))


class CompactByKernel:
    """Both by kernels, on a GPU; plans compile them."""

    @staticmethod
    def find(hidden: torch.Tensor | None, key_hidden: torch.Tensor | None, positions: int, keys: int | None) -> Found:
        """As `CompactByTorch.find`, in one launch and what adds up offsets."""
        some = hidden if hidden is not None else key_hidden
        assert some is not None
        samples, some = len(some), some.contiguous()
        places = torch.empty(samples, positions, dtype=torch.int32, device=some.device)
        key_places = places if keys is None else places.new_empty(samples, keys)
        counts = places.new_empty(4, samples)
        given = (hidden is not None) | (keys is not None) << 1 | (key_hidden is not None) << 2
        masks = (some if mask is None else mask.contiguous() for mask in (hidden, key_hidden))
        kernel = _FIND.ready(some.device)
        kernel(
            (*masks, places, key_places, counts), samples, 1, 1, (given, positions, positions if keys is None else keys)
        )
        offsets = _offsets(counts[2:])
        ours = Tokens(counts[0], offsets[0], places)
        return ours, None if keys is None else Tokens(counts[1], offsets[1], key_places)

    @staticmethod
    def together(x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """As `CompactByTorch.together`; what lies behind the zeros is anything."""
        x = readable(x, _ACCESS // x.element_size())
        if x.data_ptr() % _ACCESS:
            x = x.clone(memory_format=torch.contiguous_format)
        rows = x.new_empty(tokens.places.numel(), x.shape[-1])
        _move(as_one(x, reach(x)), rows, rows, tokens, x[:, :, None], False)
        return rows

    @staticmethod
    def back(rows: torch.Tensor, tokens: Tokens, x: torch.Tensor) -> None:
        """As `CompactByTorch.back`, where pieces lie in steps of 16 bytes."""
        rows = rows.contiguous()
        _move(rows, as_one(x, reach(x)), rows, tokens, x, True)


def _move(
    source: torch.Tensor, target: torch.Tensor, rows: torch.Tensor, tokens: Tokens, apart: torch.Tensor, back: bool
) -> None:
    """Launch over rows [T, G * P], which stand in `apart` [B, S, G, P]."""
    if not rows.numel():
        return
    vector = _ACCESS // rows.element_size()
    sample, position, piece, _ = (step // vector for step in apart.stride())
    sizes = (rows.shape[1] // vector, apart.shape[3] // vector)
    kernel = _MOVE[rows.dtype].ready(rows.device)
    numbers = (*tokens.places.shape, sample, position, piece, *sizes, int(back))
    kernel((tokens.offsets, tokens.places, source, target), rows.shape[0], 1, 1, numbers)


def reason_not(dtype: torch.dtype) -> str | None:
    """Why the kernels do not take such rows; None when they do."""
    return (
        None
        if dtype in _DTYPES
        else f"the kernel that moves rows takes {', '.join(_DTYPES.values())}, there is {dtype}"
    )


class _RowKernel(TextKernel["_native.CudaKernel"]):
    """One of those that `moved_rows.cu` has, as plans compile it beside their generated ones."""

    def text(self) -> str:
        """The CUDA text: the constants, and `moved_rows.cu`."""
        constants = f"constexpr int kThreads = {_THREADS}, kBehind = {_BEHIND};"
        return "\n".join(['#include "te_cuda.cuh"', "", constants, "", _SOURCE.read_text()])


@dataclass(frozen=True)
class FindTokens(_RowKernel):
    """The kernel that finds tokens."""

    name: ClassVar[str] = "find_tokens"

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        tensors = [("bool", 1)] * 2 + [("int32", 4)] * 3
        return over_rows(self.name, cubin, tensors, 2, 3, _THREADS, blocks=_BLOCKS)


@dataclass(frozen=True)
class MoveRows(_RowKernel):
    """The kernel that moves rows."""

    dtype: torch.dtype
    name: ClassVar[str] = "move_rows"

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        tensors = [("int32", 4)] * 2 + [(_DTYPES[self.dtype], _ACCESS)] * 2
        return over_rows(self.name, cubin, tensors, 3, 8, _THREADS, blocks=_BLOCKS)


_FIND, _MOVE = FindTokens(), {dtype: MoveRows(dtype) for dtype in _DTYPES}

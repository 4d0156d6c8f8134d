"""Sequences of several lengths, as kernels are told them: offsets and a window, no dense mask."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, over_rows
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.qkv_views import HeadsCall, Tensors
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.mask import COUNTS, AttentionMask

_THREADS, _ROWS, _BLOCKS = 256, 32, 8  # of a block; that it looks at together; of a multiprocessor
_ACCESS = 16  # bytes that a thread writes at once
_NO_BOUND = 2**31 - 1
# Dtype -> its name, and two elements that are NaN.
_DTYPES = {torch.bfloat16: ("bfloat16", 0x7FC07FC0), torch.float16: ("float16", 0x7E007E00)}


@dataclass(frozen=True)
class Side:
    """Sequences on one side of an attention, as a call says.

    Attributes:
        positions: S, or T.
        offsets: int32 [N + 1]: sequence n is rows offsets[n] up to offsets[n + 1]; None: samples are sequences.
        lengths: int32 [N]: so many rows of each are there; None: all.
    """

    positions: int
    offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """Rows of each sequence with what is behind it, [N]; `like` is any int32 [N]."""
        return torch.full_like(like, self.positions) if self.offsets is None else self.offsets.diff()

    def wrong(self, like: torch.Tensor, longest: int | None) -> torch.Tensor:
        """Mask of sequences that lie outside of what there is, or pass the longest, [N]."""
        room = self.room(like)
        found = torch.zeros_like(room, dtype=torch.bool)
        if self.lengths is not None:
            found |= (self.lengths < 0) | (self.lengths > room)
        if self.offsets is not None:
            found |= (self.offsets[1:] > self.positions) | (self.offsets[:-1] < 0)
            found |= room > (_NO_BOUND if longest is None else longest)
            found[:1] |= self.offsets[:-1][:1] != 0
        return found

    def seen(self, like: torch.Tensor) -> torch.Tensor:
        """Count of rows of each sequence that are there, [N]."""
        return self.room(like) if self.lengths is None else self.lengths


@dataclass(frozen=True)
class Blanks:
    """Rule for which rows are blank.

    Attributes:
        own, other: the side whose rows these are, and the one that they are attended with; None: the same.
        longest: what kernels were told of the longest sequence of `offsets`.
        sequence_first: whether rows are [S, B], else [B, S]; of offsets they are [T].
    """

    own: Side
    other: Side | None = None
    longest: int | None = None
    sequence_first: bool = False

    @property
    def given(self) -> tuple[torch.Tensor | None, ...]:
        """Tensors on the device: offsets and lengths of both sides."""
        other = self.other or Side(1)
        return self.own.offsets, self.own.lengths, other.offsets, other.lengths

    @property
    def counts(self) -> torch.Tensor | None:
        """Any tensor that has a number for each sequence, [N]."""
        found = (t if place % 2 or t is None else t[1:] for place, t in enumerate(self.given))
        return next((t for t in found if t is not None), None)


Blank = Callable[[torch.Tensor, Blanks], None]


def blank_by_torch(x: torch.Tensor, blanks: Blanks) -> None:
    """Rows of x [S, B, F], [B, S, F] or [T, F], by PyTorch."""
    like, own, other = blanks.counts, blanks.own, blanks.other or Side(1)
    if like is None:
        return
    wrong = own.wrong(like, blanks.longest) | other.wrong(like, blanks.longest)
    seen = own.seen(like).masked_fill(other.seen(like) == 0, 0)
    rows = torch.arange(own.positions, device=x.device)
    if own.offsets is None:
        zero, wrong = rows >= seen[:, None], wrong[:, None].expand(-1, own.positions)
        zero, wrong = (zero.mT, wrong.mT) if blanks.sequence_first else (zero, wrong)
    else:
        n = torch.bucketize(rows, own.offsets[1:], right=True)  # N behind the last one
        zero = rows - own.offsets[n] >= torch.cat((seen, seen.new_zeros(1)))[n]
        wrong = torch.cat((wrong, wrong.new_zeros(1)))[n]
    x.masked_fill_(zero[..., None], 0.0).masked_fill_(wrong[..., None], torch.nan)


def blank_by_kernel(x: torch.Tensor, blanks: Blanks) -> None:
    """Blank x [S, B, F], [B, S, F] or [T, F] in one launch; plans compile the kernel."""
    like, own, other = blanks.counts, blanks.own, blanks.other or Side(1)
    if like is None or not x.numel():
        return
    given = (*blanks.given, like if blanks.sequence_first else None)
    said = sum(1 << place for place, tensor in enumerate(given) if tensor is not None)
    longest = _NO_BOUND if blanks.longest is None else blanks.longest
    vectors = x.shape[-1] * x.element_size() // _ACCESS
    numbers = (said, len(like), own.positions, other.positions, longest, vectors)
    tensors = (*(like if t is None else t for t in blanks.given), x)
    _KERNELS[x.dtype].ready(x.device)(tensors, x.numel() // x.shape[-1], 1, 1, numbers)


def why_not_blanked(dtype: torch.dtype) -> str | None:
    """Reason for which the kernel does not take such rows; None when it does."""
    taken = ", ".join(name for name, _ in _DTYPES.values())
    return None if dtype in _DTYPES else f"the kernel that blanks rows takes {taken}, there is {dtype}"


@dataclass(frozen=True)
class BlankRows(TextKernel[_native.CudaKernel]):
    """The kernel as plans compile it beside their generated ones."""

    dtype: torch.dtype
    name: ClassVar[str] = "blank_rows"
    source: ClassVar[Path] = Path(__file__).with_name("blank_rows.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    def constants(self) -> list[str]:
        nan = f"constexpr unsigned kNan = 0x{_DTYPES[self.dtype][1]:08X}u;"
        return [nan, f"constexpr int kThreads = {_THREADS}, kRows = {_ROWS};"]

    def native(self, cubin: bytes) -> _native.CudaKernel:
        tensors = [("int32", 4)] * 4 + [(_DTYPES[self.dtype][0], _ACCESS)]
        return over_rows(self.name, cubin, tensors, 4, 6, _THREADS, _ROWS, blocks=_BLOCKS)


_KERNELS = {dtype: BlankRows(dtype) for dtype in _DTYPES}


# At least: kernels take calls of one query for decoding, which has other rules.
_LONGEST = 2


def window_of(mask: AttentionMask) -> tuple[int, int]:
    """(left, right) of a window with what causal hides, -1 for no bound."""
    left, right = mask.sides
    return -1 if left is None else left, -1 if right is None else right


def counts_from_the_end(p: AttentionProblem) -> str | None:
    """Reason against a kernel that aligns the last query and key, where it hides others."""
    mask = p.settings.mask
    if not mask.is_banded or mask.corner == "bottom_right" or not isinstance(p.settings.heads, ApartHeads):
        return None
    if mask.keys_alike and (mask.lengths or mask.offsets or p.positions == p.key_positions):
        return None
    return "it counts positions from the last query and key, and there may be more of one: take corner='bottom_right'"


@dataclass(frozen=True)
class Sides:
    """Sequences of queries and of keys (None: packed); kernels take `clamped` ones."""

    queries: Side
    keys: Side | None
    mask: AttentionMask
    sequence_first: bool

    @classmethod
    def of(cls, call: HeadsCall, tensors: Tensors) -> Sides:
        """Sides of a call."""
        mask, (q, k, _), heads = call.settings.mask, call.heads, call.settings.heads
        said = {
            name: t.to(q.device, torch.int32).contiguous() for name in COUNTS if (t := tensors.get(name)) is not None
        }
        queries = Side(q.shape[2], said.get("offsets"), said.get("lengths"))
        first = heads.layout == "sequence_first"
        if not isinstance(heads, ApartHeads):
            return cls(queries, None, mask, first)
        keys = Side(k.shape[2], said.get("key_offsets", queries.offsets), said.get("key_lengths"))
        return cls(queries, keys, mask, first)

    def clamped(self) -> tuple[Side, Side]:
        """Sides of queries and of keys, clamped."""
        queries = _clamped(self.queries)
        return queries, queries if self.keys is None else _clamped(self.keys)

    def blank(self, by_input: Mapping[str, torch.Tensor], blank: Blank | None) -> None:
        """Make rows that no kernel writes zero and NaN, in tensors by input."""
        if blank is None:
            return
        for name, tensor in by_input.items():
            own, other = (self.queries, self.keys) if name == "input" else (self.keys or self.queries, self.queries)
            blank(tensor, Blanks(own, other, self.mask.longest, self.sequence_first))


def _clamped(side: Side) -> Side:
    offsets, lengths = (None if t is None else t.clamp(0, side.positions) for t in (side.offsets, side.lengths))
    if offsets is not None and lengths is not None:
        lengths = torch.minimum(lengths, offsets.diff())
    return Side(side.positions, offsets, lengths)


@dataclass(frozen=True)
class Slotted:
    """Slots of one side: where they begin, and how long they are at most.

    Attributes:
        offsets: int32 [N + 1]: slot n is tokens offsets[n] up to offsets[n + 1].
        seen: int32 [N]: how many tokens of a slot there are, 0 of one that is padding.
        longest: no slot is longer.
    """

    offsets: torch.Tensor
    seen: torch.Tensor
    longest: int


@dataclass(frozen=True)
class Slots:
    """The slots of queries and of keys."""

    queries: Slotted
    keys: Slotted

    @classmethod
    def of(cls, call: HeadsCall, sides: Sides, all_rows: bool = True) -> Slots | None:
        """Slots of a call, if samples are not whole; `all_rows`: behind the last, too."""
        mask, (q, k, _) = call.settings.mask, call.heads
        if not mask.counts:
            return None
        given = [*zip(sides.clamped(), (q, k), strict=True)][: 1 if sides.keys is None else 2]
        # Behind the last sequence are so many slots that none is longer than others.
        bound = mask.longest
        longest = [s.positions if s.offsets is None or bound is None else min(bound, s.positions) for s, _ in given]
        tails = max([0, *(-(-side.positions // most) for (side, _), most in zip(given, longest, strict=True))])
        tails = tails if mask.offsets and all_rows else 0
        made = [_slotted(side, heads, mask, most, tails) for (side, heads), most in zip(given, longest, strict=True)]
        return cls(made[0], made[-1])


def _slotted(side: Side, heads: torch.Tensor, mask: AttentionMask, longest: int, tails: int) -> Slotted:
    """The slots of a side, of heads [B, H, S, D], of one sample where there are offsets."""
    begin = side.offsets
    if begin is None:
        begin = torch.arange(heads.shape[0] + 1, dtype=torch.int32, device=heads.device) * side.positions
    seen = begin.diff()
    if mask.lengths is not None or mask.key_lengths is not None:
        there = seen if side.lengths is None else side.lengths
        slots = torch.stack((begin[:-1], begin[:-1] + there), 1).flatten()
        begin, seen = torch.cat((slots, begin[-1:])), torch.stack((there, torch.zeros_like(there)), 1).flatten()
    if tails:
        steps = torch.arange(1, tails + 1, dtype=torch.int32, device=begin.device) * longest
        behind = (begin[-1:] + steps).clamp(max=side.positions)
        begin, seen = torch.cat((begin, behind)), torch.cat((seen, torch.zeros_like(behind)))
    return Slotted(begin, seen, max(longest, _LONGEST))

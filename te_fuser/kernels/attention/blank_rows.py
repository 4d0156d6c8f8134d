"""Rows that a kernel of sequences of several lengths leaves alone, or has wrong, made zero or NaN on the device.

A row of padding, and of no sequence, becomes zeros: nothing sees it, and it sees nothing. So does one whose sequence
has nothing on the other side. A row of a sequence that cannot be as the call says becomes NaN: nobody waits for the
device to raise, and no number may be wrong in silence. The others stay. The kernel's text is `blank_rows.cu`.

Shapes in this file: B samples, S positions, N sequences (or samples), T tokens, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch

from te_fuser.codegen.written import TextKernel, over_rows

if TYPE_CHECKING:
    from te_fuser import _native

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS, _ROWS, _BLOCKS = 256, 32, 8  # of a block; that it looks at together; of a multiprocessor
_ACCESS = 16  # bytes that a thread writes at once
_NO_BOUND = 2**31 - 1
# Dtype -> its name, and two elements that are NaN.
_DTYPES = {torch.bfloat16: ("bfloat16", 0x7FC07FC0), torch.float16: ("float16", 0x7E007E00)}


@dataclass(frozen=True)
class Side:
    """Where sequences lie on one side of an attention, as a call says.

    Attributes:
        positions: S, or T.
        offsets: int32 [N + 1]: sequence n is rows offsets[n] up to offsets[n + 1]; None: samples are sequences.
        lengths: int32 [N]: so many rows of each are there; None: all.
    """

    positions: int
    offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None

    def room(self, like: torch.Tensor) -> torch.Tensor:
        """How many rows there are of each sequence with what is behind it, [N]; `like` is any int32 [N]."""
        return torch.full_like(like, self.positions) if self.offsets is None else self.offsets.diff()

    def wrong(self, like: torch.Tensor, longest: int | None) -> torch.Tensor:
        """Which sequences lie outside of what there is, or pass the longest, [N]."""
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
        """How many rows of each sequence are there, [N]."""
        return self.room(like) if self.lengths is None else self.lengths


@dataclass(frozen=True)
class Blanks:
    """What says which rows are blank.

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
        """What is said on the device: offsets and lengths of both sides."""
        other = self.other or Side(1)
        return self.own.offsets, self.own.lengths, other.offsets, other.lengths

    @property
    def counts(self) -> torch.Tensor | None:
        """Any tensor that has a number for each sequence, [N]; None where nothing is said."""
        found = (t if place % 2 or t is None else t[1:] for place, t in enumerate(self.given))
        return next((t for t in found if t is not None), None)


Blank = Callable[[torch.Tensor, Blanks], None]


def by_torch(x: torch.Tensor, blanks: Blanks) -> None:
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


def by_kernel(x: torch.Tensor, blanks: Blanks) -> None:
    """Rows of x [S, B, F], [B, S, F] or [T, F], contiguous on a GPU, in one launch; plans compile the kernel."""
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


def reason_not(dtype: torch.dtype) -> str | None:
    """Why the kernel does not take such rows; None when it does."""
    taken = ", ".join(name for name, _ in _DTYPES.values())
    return None if dtype in _DTYPES else f"the kernel that blanks rows takes {taken}, there is {dtype}"


@dataclass(frozen=True)
class BlankRows(TextKernel["_native.CudaKernel"]):
    """The kernel as plans compile it beside their generated ones."""

    dtype: torch.dtype
    name: ClassVar[str] = "blank_rows"

    def text(self) -> str:
        """The CUDA text: the constants, and `blank_rows.cu`."""
        lines = ['#include "te_cuda.cuh"', "", f"constexpr unsigned kNan = 0x{_DTYPES[self.dtype][1]:08X}u;"]
        lines += [f"constexpr int kThreads = {_THREADS}, kRows = {_ROWS};", "", _SOURCE.read_text()]
        return "\n".join(lines)

    def native(self, cubin: bytes) -> _native.CudaKernel:
        """The kernel as the native runtime takes it."""
        tensors = [("int32", 4)] * 4 + [(_DTYPES[self.dtype][0], _ACCESS)]
        return over_rows(self.name, cubin, tensors, 4, 6, _THREADS, _ROWS, blocks=_BLOCKS)


_KERNELS = {dtype: BlankRows(dtype) for dtype in _DTYPES}

"""Random draws as a function of (seed, offset, stream, logical element index): Philox4x32 with 7 rounds.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011). One call gives 128 bits, 16 for each of
8 elements. The same bits come from this file, from the C++ kernels and from the CUDA kernels.

    key     = (seed low, seed high)
    counter = (group low, group high, stream, offset low),   group = row * ceil(width / 8) + column // 8
    element = column % 8 uses word element // 2, its low half when element is even, its high half when odd
    keep    = its 16 bits >= round(probability * 65536)

Where a rank has a part of the whole, row, column and width are those in the whole (`RankPlacement`), so that all ranks
draw together what one would.
"""

from __future__ import annotations

import contextvars
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from te_fuser.contexts import being

ROUNDS = 7
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = 0xFFFFFFFF


def threshold(probability: float) -> int:
    """The number of the 65,536 draws that drop; ValueError when the probability is not in [0, 1]."""
    if not 0.0 <= probability <= 1.0:
        raise ValueError(f"a drop probability lies in [0, 1], got {probability}")
    return round(probability * 65536)


def philox(counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Four 32-bit words (held in int64) for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0, low0 = (product0 >> 32) & _LOW, product0 & _LOW
        high1, low1 = (product1 >> 32) & _LOW, product1 & _LOW
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return [c0, c1, c2, c3]


def keep_bits(rows: torch.Tensor, width: int, seed: int, offset: int, stream: int) -> torch.Tensor:
    """16 random bits for each of `width` columns of the given rows, [len(rows), width], int64."""
    groups = -(-width // 8)
    group = rows.to(torch.int64)[:, None] * groups + torch.arange(groups, device=rows.device)
    words = philox(
        (group & _LOW, group >> 32, torch.full_like(group, stream & _LOW), torch.full_like(group, offset & _LOW)), seed
    )
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    return torch.stack(halves, -1).reshape(len(rows), groups * 8)[:, :width]


@dataclass(frozen=True)
class Shared:
    """Split over ranks of the rows and columns that are drawn for; kernels are made for it, whatever the rank.

    Attributes:
        apart: whether the rows of a rank are several blocks of the whole's, and not one.
        samples: whether it is by samples that rows are shared.
        parts: the columns are so many tensors side by side, each of them shared.
    """

    rows: int = 1
    apart: bool = False
    samples: bool = False
    columns: int = 1
    parts: int = 1


@dataclass(frozen=True)
class RankPlacement:
    """Place of a rank's rows and columns in the whole: of as many blocks in a row as there are ranks, it has one.

        whole row = row + block * (rank + row // block * (ranks - 1)),   block = row_block

    and so for columns, with a block for each of the parts.
    """

    shared: Shared
    row_rank: int = 0
    column_rank: int = 0
    row_block: int = 1

    def rows(self, rows: torch.Tensor) -> torch.Tensor:
        return _of_whole(rows, self.row_block, self.row_rank, self.shared.rows)

    def columns(self, columns: torch.Tensor, width: int) -> torch.Tensor:
        return _of_whole(columns, width // self.shared.parts, self.column_rank, self.shared.columns)

    def samples(self, samples: torch.Tensor, size: int) -> torch.Tensor:
        return samples + size * self.row_rank if self.shared.samples else samples

    def of_blocks(self, index: torch.Tensor, block: int, samples: int) -> torch.Tensor:
        """Places in the whole of what lies sample by sample, in blocks that are shared as columns are."""
        found = _of_whole(index, block, self.column_rank, self.shared.columns)
        return found + samples * block * self.shared.columns * self.row_rank if self.shared.samples else found


def _of_whole(index: torch.Tensor, block: int, rank: int, ranks: int) -> torch.Tensor:
    return index if ranks == 1 else index + block * (rank + index // block * (ranks - 1))


@dataclass(frozen=True)
class RandomStream:
    """Source of one op's draws, with the map of its rows to samples: sample = (row // inner) % size."""

    seed: int
    offset: int
    stream: int
    batch_inner: int = 1
    batch_size: int = 1
    placed: RankPlacement | None = None  # None: the rank has all

    def bits(self, rows: int, width: int, device: torch.device) -> torch.Tensor:
        drawn, placed = torch.arange(rows, device=device), self.placed
        if placed is None:
            return keep_bits(drawn, width, self.seed, self.offset, self.stream)
        whole = width * placed.shared.columns
        bits = keep_bits(placed.rows(drawn), whole, self.seed, self.offset, self.stream)
        return bits[:, placed.columns(torch.arange(width, device=device), width)]

    def sample_bits(self, size: int, device: torch.device) -> torch.Tensor:
        samples = torch.arange(size, device=device)
        if self.placed is not None:
            samples = self.placed.samples(samples, size)
        return keep_bits(samples, 1, self.seed, self.offset, self.stream)

    def mask(self, x: torch.Tensor, drop_below: int, per_sample: bool) -> torch.Tensor:
        """The keep mask for x of shape [rows, features], in its dtype."""
        if per_sample:
            bits = self.sample_bits(self.batch_size, x.device)
            row = torch.arange(x.shape[0], device=x.device)
            return (bits >= drop_below).to(x.dtype)[(row // self.batch_inner) % self.batch_size]
        bits = self.bits(x.shape[0], x.shape[-1], x.device)
        return (bits >= drop_below).to(x.dtype)


_current: contextvars.ContextVar[RandomStream | None] = contextvars.ContextVar("te_fuser_random_stream", default=None)


def current() -> RandomStream:
    """The stream of the op being computed; RuntimeError outside `using`."""
    stream = _current.get()
    if stream is None:
        raise RuntimeError("keep_mask needs a random stream: call the op or the model, not its compute()")
    return stream


def using(stream: RandomStream) -> AbstractContextManager[RandomStream]:
    return being(_current, stream)

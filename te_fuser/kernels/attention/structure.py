"""What hides by structure, as kernels of sequences of several lengths take it: offsets and a window, no dense mask.

Such a kernel takes tokens one behind the other. Here each token is of some slot: a sequence, or the padding behind one.
The padding's queries see no key, for which kernels give zeros, and no gradient comes from them. Nothing waits for the
device: offsets stay there, and how long a slot can be is known by shapes, or by what the mask says.

Shapes in this file: B samples, S positions, N slots, T tokens, U tokens of keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fuser.kernels.attention.blank_rows import Blank, Blanks, Side
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.separate import Separate, Tensors
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.mask import COUNTS, AttentionMask

# At least: kernels take calls of one query for decoding, which has other rules.
_LONGEST = 2


def window_of(mask: AttentionMask) -> tuple[int, int]:
    """(left, right) of a window with what causal hides, -1 for no bound."""
    left, right = mask.sides
    return -1 if left is None else left, -1 if right is None else right


def counts_from_the_end(p: AttentionProblem) -> str | None:
    """Why a kernel that aligns the last query with the last key would hide others; None where it does not."""
    mask = p.settings.mask
    if not mask.is_banded or mask.corner == "bottom_right" or not isinstance(p.settings.heads, ApartHeads):
        return None
    if mask.keys_alike and (mask.lengths or mask.offsets or p.positions == p.key_positions):
        return None
    return "it counts positions from the last query and key, and there may be more of one: take corner='bottom_right'"


@dataclass(frozen=True)
class Sides:
    """Where sequences of queries and of keys lie, as a call says; `keys` is None where heads are packed.

    The kernels take `clamped` numbers: none is beyond the memory of heads, whatever a call says.
    """

    queries: Side
    keys: Side | None
    mask: AttentionMask
    sequence_first: bool

    @classmethod
    def of(cls, call: Separate, tensors: Tensors) -> Sides:
        """Those of a call."""
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
        """Of queries and of keys."""
        queries = _clamped(self.queries)
        return queries, queries if self.keys is None else _clamped(self.keys)

    def blank(self, by_input: Mapping[str, torch.Tensor], blank: Blank | None) -> None:
        """Make what no kernel writes, or has wrong, zero and NaN, in tensors by the input whose positions they have.

        None: nobody reads that.
        """
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
    """Where slots begin on one side, and how long they are at most.

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
    def of(cls, call: Separate, sides: Sides, all_rows: bool = True) -> Slots | None:
        """Those of a call; None where all samples are whole. `all_rows`: also of what is behind the last sequence."""
        mask, (q, k, _) = call.settings.mask, call.heads
        if not mask.counts:
            return None
        queries, keys = sides.clamped()
        begun = _Begun.of(queries, q, mask)
        if sides.keys is None:
            side = begun.side(begun.tails if all_rows else 0)
            return cls(side, side)
        other = _Begun.of(keys, k, mask)
        tails = max(begun.tails, other.tails) if all_rows else 0
        return cls(begun.side(tails), other.side(tails))


@dataclass(frozen=True)
class _Begun:
    """One side before what is behind the last sequence: that is `tails` slots, so that none is longer than others."""

    begin: torch.Tensor
    counts: torch.Tensor
    positions: int
    longest: int
    tails: int

    @classmethod
    def of(cls, side: Side, heads: torch.Tensor, mask: AttentionMask) -> _Begun:
        """Of heads [B, H, S, D], which are one sample where there are offsets."""
        positions, begin = side.positions, side.offsets
        longest, tails = positions, 0
        if begin is None:
            begin = torch.arange(heads.shape[0] + 1, dtype=torch.int32, device=heads.device) * positions
        else:
            longest = positions if mask.longest is None else min(mask.longest, positions)
            tails = -(-positions // longest)
        counts = begin.diff()
        if mask.lengths is None and mask.key_lengths is None:
            return cls(begin, counts, positions, longest, tails)
        seen = counts if side.lengths is None else side.lengths
        first = begin[:-1]
        slots = torch.stack((first, first + seen), 1).flatten()
        seen = torch.stack((seen, torch.zeros_like(seen)), 1).flatten()
        return cls(torch.cat((slots, begin[-1:])), seen, positions, longest, tails)

    def side(self, tails: int) -> Slotted:
        """With so many slots for what is behind the last sequence."""
        longest = max(self.longest, _LONGEST)
        if not tails:
            return Slotted(self.begin, self.counts, longest)
        steps = torch.arange(1, tails + 1, dtype=torch.int32, device=self.begin.device) * self.longest
        behind = (self.begin[-1:] + steps).clamp(max=self.positions)
        return Slotted(torch.cat((self.begin, behind)), torch.cat((self.counts, torch.zeros_like(behind))), longest)

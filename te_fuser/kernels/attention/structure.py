"""What hides by structure, as kernels of sequences of several lengths take it: offsets and a window, no dense mask.

Such a kernel takes tokens one behind the other. Here each token is of some slot: a sequence, or the padding behind one.
The padding's queries see no key, for which kernels give zeros, and no gradient comes from them. Nothing waits for the
device: offsets stay there, and how long a slot can be is known by shapes, or by what the mask says.

Shapes in this file: B samples, S positions, N slots, T tokens, U tokens of keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.separate import Separate, Tensors
from te_fuser.ops.attention_heads import ApartHeads
from te_fuser.ops.attention_mask import AttentionMask

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
class Side:
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

    queries: Side
    keys: Side

    @classmethod
    def of(cls, call: Separate, tensors: Tensors) -> Slots | None:
        """Those of a call; None where all samples are whole."""
        mask, (q, k, _) = call.settings.mask, call.heads
        if not (mask.lengths or mask.key_lengths or mask.offsets):
            return None
        offsets = tensors.get("offsets")
        queries = _Slotted.of(q, offsets, tensors.get("lengths"), mask)
        if not isinstance(call.settings.heads, ApartHeads):
            side = queries.side(queries.tails)
            return cls(side, side)
        key_offsets = tensors.get("key_offsets")
        key_offsets = offsets if key_offsets is None else key_offsets
        keys = _Slotted.of(k, key_offsets, tensors.get("key_lengths"), mask)
        tails = max(queries.tails, keys.tails)
        return cls(queries.side(tails), keys.side(tails))


@dataclass(frozen=True)
class _Slotted:
    """One side before what is behind the last sequence: that is `tails` slots, so that none is longer than others."""

    begin: torch.Tensor
    counts: torch.Tensor
    positions: int
    longest: int
    tails: int

    @classmethod
    def of(
        cls, heads: torch.Tensor, offsets: torch.Tensor | None, lengths: torch.Tensor | None, mask: AttentionMask
    ) -> _Slotted:
        """Of heads [B, H, S, D], which are one sample where there are offsets."""
        samples, _, positions, _ = heads.shape
        if offsets is None:
            begin = torch.arange(samples + 1, dtype=torch.int32, device=heads.device) * positions
            longest, tails = positions, 0
        else:
            begin = offsets.to(heads.device, torch.int32).clamp(max=positions)
            longest = positions if mask.longest is None else min(mask.longest, positions)
            tails = -(-positions // longest)
        counts = begin.diff()
        if mask.lengths is None and mask.key_lengths is None:
            return cls(begin, counts, positions, longest, tails)
        seen = counts if lengths is None else torch.minimum(lengths.to(counts), counts)
        first = begin[:-1]
        slots = torch.stack((first, first + seen), 1).flatten()
        seen = torch.stack((seen, torch.zeros_like(seen)), 1).flatten()
        return cls(torch.cat((slots, begin[-1:])), seen, positions, longest, tails)

    def side(self, tails: int) -> Side:
        """With so many slots for what is behind the last sequence."""
        longest = max(self.longest, _LONGEST)
        if not tails:
            return Side(self.begin, self.counts, longest)
        steps = torch.arange(1, tails + 1, dtype=torch.int32, device=self.begin.device) * self.longest
        behind = (self.begin[-1:] + steps).clamp(max=self.positions)
        return Side(torch.cat((self.begin, behind)), torch.cat((self.counts, torch.zeros_like(behind))), longest)

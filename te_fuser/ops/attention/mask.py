"""Masks of attention: by the structure of positions, by lengths, by a boolean tensor.

Shapes in this file: B samples, S queries, K keys, N sequences that lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from te_fuser.ops.attention.heads import one_of
from te_fuser.ops.base import Spec
from te_fuser.ops.checks import check_name, may_look, whole_number, yes_or_no

# Name of a mask -> (hides later positions, is given a boolean tensor).
MASKS = {"none": (False, False), "causal": (True, False), "given": (False, True), "causal_and_given": (True, True)}
# The masks in words, for who gives none; Transformer Engine's words and what they are here.
SAYS_MASK = (
    '"none", "causal" (a position sees those up to its own), "given" (the call gives a boolean tensor, True = hidden), '
    '"causal_and_given", or an AttentionMask (windows, lengths, padding)'
)
THEIR_MASKS = {
    "no_mask": '"none"',
    "arbitrary": '"given"',
    "padding": "AttentionMask(lengths=..) or (padding=..)",
    "padding_causal": "AttentionMask(causal=True, lengths=..) or (causal=True, padding=..)",
    "causal_bottom_right": 'AttentionMask(causal=True, corner="bottom_right")',
    "padding_causal_bottom_right": 'AttentionMask(causal=True, corner="bottom_right", lengths=..)',
}
# What hides by structure beyond later positions.
BY_OFFSETS = "sequences one behind the other"
HIDDEN_BY = ("lengths of samples", BY_OFFSETS, "a window", "a diagonal from the bottom right")
PADDED = "padding by a boolean tensor"
CORNERS = {"top_left": "the first query sees the first key", "bottom_right": "the last query sees the last key"}

_INTEGERS = (torch.int32, torch.int64)
COUNTS = ("lengths", "key_lengths", "offsets", "key_offsets")
PADDINGS = ("padding", "key_padding")


@dataclass(frozen=True)
class AttentionMask:
    """Mask of attention: the keys that a query sees; all by default.

    With d = key position - query position, where "bottom_right" counts both from the end of their sequence (its length,
    or else the last position that is no padding):

        seen: d <= 0 if causal, -left <= d <= right in a window, both positions below their lengths, in one sequence

    Attributes:
        causal: hides later positions.
        corner: "top_left" or "bottom_right": what is aligned where queries and keys have different lengths.
        window: (left, right), how many positions before and after its own a query sees; None: all of them.
        given: the name of a boolean input, True = hidden, broadcastable to [batch, heads, queries, keys].
        lengths: the name of an input of whole numbers, [B]: the number of positions of each sample. The others
            see nothing, and nothing sees them.
        key_lengths: the same for keys that are apart; None: all of them are there.
        offsets: for layout="tokens", the name of whole numbers [N + 1]: sequence n is tokens offsets[n] up to
            offsets[n + 1]. With `lengths`, [N], it begins there and has so many tokens; what is behind it is padding.
        key_offsets: the same for keys that are apart; None: theirs are the queries'.
        padding: the name of a boolean input [B, 1, 1, S], True = padding, wherever it lies: it sees nothing, and
            nothing sees it.
        key_padding: the same for keys that are apart, [B, 1, 1, K]; None: all of them are there. It may be the queries'
            own, by the same name.
        longest: a bound that the caller knows for the sequences of `offsets`, padding included: a kernel then starts
            for so many positions of each, and not for all tokens.

    Lengths and offsets are read on the device. On a CPU a sequence that is longer than the longest, or lies outside of
    the tensors, is a ValueError; on a GPU its rows are NaN where a kernel is told the structure.
    """

    causal: bool = False
    corner: str = "top_left"
    window: tuple[int | None, int | None] | None = None
    given: str | None = None
    lengths: str | None = None
    key_lengths: str | None = None
    offsets: str | None = None
    key_offsets: str | None = None
    padding: str | None = None
    key_padding: str | None = None
    longest: int | None = None

    def __post_init__(self) -> None:
        one_of("corner", self.corner, CORNERS)
        for name in ("given", *COUNTS, *PADDINGS):
            if getattr(self, name) is not None:
                check_name(getattr(self, name))
        yes_or_no("AttentionMask", "causal", self.causal)
        if self.longest is not None:
            whole_number("AttentionMask", "longest", self.longest)
        sides = (None, None) if self.window is None else self.window
        is_pair = isinstance(sides, (tuple, list)) and len(sides) == 2
        if not is_pair or any(isinstance(s, bool) or not (s is None or isinstance(s, int) and s >= 0) for s in sides):
            raise ValueError(
                f"window is (left, right), how many positions a query sees on each side, None for all; got "
                f"{self.window!r}"
            )
        if self.longest is not None and (self.longest < 1 or self.offsets is None):
            raise ValueError(f"longest, at least 1, bounds the sequences that offsets tell apart; got {self.longest}")

    @classmethod
    def of(cls, mask: str | AttentionMask, name: str) -> AttentionMask:
        """The mask called so, a given tensor under `name`; or the mask itself."""
        if isinstance(mask, AttentionMask):
            return mask
        if isinstance(mask, torch.Tensor):
            raise TypeError(
                f'mask=<a tensor>: a tensor goes with the call: make it with mask="given", and call with {name}=..., '
                "True = hidden"
            )
        causal, given = MASKS[one_of("mask", mask, MASKS, THEIR_MASKS)]
        return cls(causal=causal, given=name if given else None)

    @property
    def names(self) -> dict[str, str]:
        """Argument -> the name of the input that it reads."""
        found = {"attention_mask": self.given, **{name: getattr(self, name) for name in (*COUNTS, *PADDINGS)}}
        return {argument: name for argument, name in found.items() if name is not None}

    @property
    def sides(self) -> tuple[int | None, int | None]:
        """The window with what causal hides."""
        left, right = self.window or (None, None)
        return left, 0 if self.causal else right

    @property
    def beyond(self) -> tuple[str, ...]:
        """Kinds of hiding beyond that of later positions and by a given tensor, in words."""
        asked = (
            self.lengths or self.key_lengths,
            self.offsets or self.key_offsets,
            any(side is not None for side in self.window or ()),
            self.corner == "bottom_right" and self.is_banded,
        )
        return tuple(words for words, wanted in zip((*HIDDEN_BY, PADDED), (*asked, self.padded), strict=True) if wanted)

    @property
    def counts(self) -> bool:
        """True where lengths or offsets of sequences are given."""
        return any(getattr(self, name) is not None for name in COUNTS)

    @property
    def padded(self) -> bool:
        """True where boolean tensors say what is padding."""
        return self.padding is not None or self.key_padding is not None

    @property
    def keys_alike(self) -> bool:
        """True where keys that are apart have the same offsets and lengths as queries."""
        return self.key_offsets in (None, self.offsets) and self.key_lengths == self.lengths

    @property
    def is_banded(self) -> bool:
        """True where it hides by the distance of positions."""
        return self.sides != (None, None)

    def pairs(self, positions: int, causal_alone: bool = False) -> float:
        """Number of pairs of queries and keys in sight; `causal_alone`: without the window."""
        sides = (None, 0 if self.causal else None) if causal_alone else self.sides
        last = positions - 1.0
        farthest = [last if side is None else min(side, last) for side in sides]
        return positions + sum(n * last - n * (n - 1) / 2 for n in farthest)

    @property
    def shows_all(self) -> bool:
        """True where each query surely sees a key."""
        return not self.beyond and self.given is None

    def check(self, op: str, samples: int, others: Mapping[str, Spec], tokens: bool) -> None:
        """Raise, in words, when lengths and offsets are not whole numbers of their shape."""
        known = {name: spec for name in COUNTS if (spec := others.get(name)) is not None}
        for argument in COUNTS:
            name = getattr(self, argument)
            if name is None:
                continue
            spec = known.get(argument)
            if spec is None:
                raise ValueError(f"{op} reads {argument} from {name!r}: call the model with {name}=...")
            if spec.dtype not in _INTEGERS:
                raise TypeError(f"{name!r} is {spec.dtype}; {op} takes whole numbers: convert with .int()")
            offsets = argument.endswith("offsets")
            begins = "key_offsets" if argument == "key_lengths" and self.key_offsets else "offsets"
            sequences = known[begins].shape[0] - 1 if tokens and not offsets else samples
            if len(spec.shape) != 1 or (spec.shape[0] < 1 if offsets else spec.shape[0] != sequences):
                wanted = "[sequences + 1]" if offsets else f"[{sequences}]"
                raise ValueError(f"{name!r} has shape {list(spec.shape)}; {op} takes {argument} {wanted}")
        both = [known[name].shape[0] for name in ("offsets", "key_offsets") if name in known]
        if len(both) == 2 and both[0] != both[1]:
            raise ValueError(f"{self.offsets!r} and {self.key_offsets!r} say {both}; {op} takes as many of both")

    def check_padding(self, op: str, full: tuple[int, int, int, int], others: Mapping[str, Spec]) -> None:
        """Raise, in words, when padding is no boolean tensor for [batch, heads, queries, keys] = full."""
        samples, _, *positions = full
        for argument, count in zip(PADDINGS, positions, strict=True):
            name, spec = getattr(self, argument), others.get(argument)
            if name is None:
                continue
            if spec is None:
                raise ValueError(f"{op} reads {argument} from {name!r}: call the model with {name}=...")
            if spec.dtype != torch.bool:
                raise TypeError(
                    f"{name!r} is {spec.dtype}; {op} takes booleans, True = padding: convert with == 0, say"
                )
            if spec.shape != (samples, 1, 1, count):
                hint = "; give mask[:, None, None, :]" if spec.shape == (samples, count) else ""
                raise ValueError(
                    f"{name!r} has shape {[*spec.shape]}; {op} takes [batch, 1, 1, positions] = "
                    f"{[samples, 1, 1, count]}{hint}"
                )

    def check_counts(self, counts: Mapping[str, torch.Tensor | None], positions: int, keys: int | None) -> None:
        """Raise, in words, when a sequence lies outside of so many positions and keys, or is too long."""
        sides = [("offsets", "lengths", positions)]
        if keys is not None:
            sides.append(("key_offsets" if self.key_offsets else "offsets", "key_lengths", keys))
        for begins, ends, room in sides:
            offsets, lengths = counts.get(begins), counts.get(ends)
            rooms: torch.Tensor | None = None
            if offsets is not None:
                rooms = offsets.diff()
                self._check_offsets(getattr(self, begins), offsets, rooms, room)
            if lengths is not None:
                most = torch.full_like(lengths, room) if rooms is None else rooms
                wrong = ((lengths < 0) | (lengths > most)).nonzero()
                if len(wrong):
                    n, what = int(wrong[0]), "sample" if rooms is None else "sequence"
                    raise ValueError(
                        f"{getattr(self, ends)!r} says that {what} {n} has {int(lengths[n])} positions, and there is "
                        f"room for {int(most[n])}: give lengths from 0 to that"
                    )

    def _check_offsets(self, name: str, offsets: torch.Tensor, rooms: torch.Tensor, tokens: int) -> None:
        if int(offsets[0]) != 0 or bool((rooms < 0).any()) or int(offsets[-1]) > tokens:
            raise ValueError(
                f"{name!r} go from {int(offsets[0])} to {int(offsets[-1])} with steps of at least "
                f"{int(rooms.min()) if len(rooms) else 0}, and there are {tokens} tokens: offsets begin with 0, never "
                "fall, and end within the tokens"
            )
        if self.longest is not None and len(rooms) and int(rooms.max()) > self.longest:
            n = int(rooms.argmax())
            raise ValueError(
                f"{name!r} says that sequence {n} has {int(rooms[n])} tokens with its padding, and longest="
                f"{self.longest}: give a longest that bounds all of them, or none"
            )


@dataclass(frozen=True)
class Places:
    """Positions of one side: their `place` [1, S] in sequences whose lengths `table` has, [B] or [N + 1].

    `sequence` [1, S] numbers them where several lie one behind the other; tokens behind the last are of sequence N,
    whose length is 0. `length` is [B, 1], [1, S], or a plain number where all are as long as the tensor.
    """

    place: torch.Tensor
    length: torch.Tensor | int
    table: torch.Tensor | int
    sequence: torch.Tensor | None = None

    @classmethod
    def of(
        cls, positions: int, lengths: torch.Tensor | None, offsets: torch.Tensor | None, device: torch.device
    ) -> Places:
        """The places of `positions` positions."""
        at = torch.arange(positions, device=device)
        if offsets is not None:
            offsets = offsets.long()
            sequence = torch.bucketize(at, offsets[1:], right=True)
            counts = offsets.diff() if lengths is None else lengths.long()
            table = torch.cat((counts, counts.new_zeros(1)))
            return cls((at - offsets[sequence])[None], table[sequence][None], table, sequence[None])
        if lengths is None:
            return cls(at[None], positions, positions)
        return cls(at[None], lengths.long()[:, None], lengths.long())

    def end(self, padding: torch.Tensor | None) -> torch.Tensor | int:
        """End of each sequence [B]: its length, or behind the last position that `padding` shows."""
        if padding is None or isinstance(self.table, torch.Tensor):
            return self.table
        shown = (self.place + 1) * padding[:, 0, 0].logical_not()
        return F.pad(shown, (1, 0)).amax(1)


@dataclass(frozen=True)
class Band:
    """Mask of one call, with the places of its queries and keys."""

    mask: AttentionMask
    queries: Places
    keys: Places
    padding: torch.Tensor | None = None
    key_padding: torch.Tensor | None = None

    @classmethod
    def of(
        cls,
        mask: AttentionMask,
        tensors: Mapping[str, torch.Tensor | None],
        sizes: tuple[int, int],
        apart: bool,
        device: torch.device,
    ) -> Band:
        """The band of `sizes` (queries, keys)."""
        if mask.counts and may_look(device):
            mask.check_counts(tensors, sizes[0], sizes[1] if apart else None)
        lengths, offsets, padding = (tensors.get(name) for name in ("lengths", "offsets", "padding"))
        queries = Places.of(sizes[0], lengths, offsets, device)
        if not apart:
            return cls(mask, queries, queries, padding, padding)
        key_offsets = tensors.get("key_offsets")
        key_offsets = offsets if key_offsets is None else key_offsets
        keys = Places.of(sizes[1], tensors.get("key_lengths"), key_offsets, device)
        return cls(mask, queries, keys, padding, tensors.get("key_padding"))

    def distance(self) -> torch.Tensor:
        """Key position - query position, [B or 1, S, K]."""
        found = self.keys.place[:, None, :] - self.queries.place[:, :, None]
        if self.mask.corner == "top_left":
            return found
        if self.padding is self.key_padding:
            behind = self.keys.table - self.queries.table
        else:
            behind = self.keys.end(self.key_padding) - self.queries.end(self.padding)
        if self.queries.sequence is not None:
            assert isinstance(behind, torch.Tensor)
            behind = behind[self.queries.sequence]  # [1, S]
        elif isinstance(behind, torch.Tensor):
            behind = behind[:, None]
        return found - (behind[:, :, None] if isinstance(behind, torch.Tensor) else behind)

    def hidden(self) -> torch.Tensor | None:
        """Boolean mask of the band, True = hidden, [B or 1, 1, S, K]; None where all is seen."""
        found: list[torch.Tensor] = []
        left, right = self.mask.sides
        if self.mask.is_banded:
            distance = self.distance()
            found += [] if right is None else [distance > right]
            found += [] if left is None else [distance < -left]
        for side, at in ((self.queries, (..., None)), (self.keys, (slice(None), None))):
            if isinstance(side.length, torch.Tensor):
                found.append((side.place >= side.length)[at])
        if self.queries.sequence is not None and self.keys.sequence is not None:
            found.append(self.queries.sequence[:, :, None] != self.keys.sequence[:, None, :])
        found += [] if self.padding is None else [self.padding[:, 0, 0, :, None]]
        found += [] if self.key_padding is None else [self.key_padding[:, 0]]
        if not found:
            return None
        hidden = found[0]
        for other in found[1:]:
            hidden = hidden | other
        return hidden[:, None]

    def with_given(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Boolean mask of `hidden` and a given tensor, [B or 1, H or 1, S or 1, K or 1], if any."""
        hidden = self.hidden()
        if mask is None:
            return hidden
        mask = mask.view((1,) * (4 - mask.dim()) + mask.shape)
        return mask if hidden is None else hidden | mask

"""Padding by boolean tensors for kernels that are told lengths and offsets, without a dense mask."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import torch

from te_fuser import _native
from te_fuser.codegen.cuda_source_kernel import TextKernel, over_rows
from te_fuser.formula.random import RandomStream
from te_fuser.kernels.attention.lengths import Blank
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Provider, Saved
from te_fuser.kernels.attention.qkv_views import Gradients, HeadsCall, Tensors
from te_fuser.kernels.heads_pass import as_one, reach, readable
from te_fuser.ops.attention.dot_product_attention import AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads, split_inputs
from te_fuser.ops.attention.mask import BY_OFFSETS, PADDED, AttentionMask
from te_fuser.ops.attention.math import SOFT_CAP

_THREADS, _BLOCKS, _BEHIND = 256, 8, 256
_ACCESS = 16  # bytes that a thread moves at once
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Tokens:
    """Tokens of one side, by a mask of padding.

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
    """Search for tokens and their move by PyTorch, which moves all rows."""

    @staticmethod
    def find(hidden: torch.Tensor | None, key_hidden: torch.Tensor | None, positions: int, keys: int | None) -> Found:
        """Tokens of queries and keys, by masks [B, 1, 1, S] and [B, 1, 1, K]."""
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
        """Rows [T, G * P] of such tokens to their places in x [B, S, G, P]."""
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
    """Search for tokens and their move by kernels, on a GPU; plans compile them."""

    @staticmethod
    def find(hidden: torch.Tensor | None, key_hidden: torch.Tensor | None, positions: int, keys: int | None) -> Found:
        """Do as `CompactByTorch.find`, in one launch and what adds up offsets."""
        some = hidden if hidden is not None else key_hidden
        assert some is not None
        samples, some = len(some), some.contiguous()
        places = torch.empty(samples, positions, dtype=torch.int32, device=some.device)
        key_places = places if keys is None else places.new_empty(samples, keys)
        counts = places.new_empty(4, samples)
        given = (hidden is not None) | (keys is not None) << 1 | (key_hidden is not None) << 2
        masks = (some if mask is None else mask.contiguous() for mask in (hidden, key_hidden))
        _FIND.ready(some.device)(
            (*masks, places, key_places, counts), samples, 1, 1, (given, positions, positions if keys is None else keys)
        )
        offsets = _offsets(counts[2:])
        ours = Tokens(counts[0], offsets[0], places)
        return ours, None if keys is None else Tokens(counts[1], offsets[1], key_places)

    @staticmethod
    def together(x: torch.Tensor, tokens: Tokens) -> torch.Tensor:
        """Do as `CompactByTorch.together`; rows behind the zeros hold anything."""
        x = readable(x, _ACCESS // x.element_size())
        if x.data_ptr() % _ACCESS:
            x = x.clone(memory_format=torch.contiguous_format)
        rows = x.new_empty(tokens.places.numel(), x.shape[-1])
        _move(as_one(x, reach(x)), rows, rows, tokens, x[:, :, None], False)
        return rows

    @staticmethod
    def back(rows: torch.Tensor, tokens: Tokens, x: torch.Tensor) -> None:
        """Do as `CompactByTorch.back`, where pieces lie in steps of 16 bytes."""
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


class _RowKernel(TextKernel[_native.CudaKernel]):
    """Kernel of `moved_rows.cu`, as plans compile it beside their generated ones."""

    source: ClassVar[Path] = Path(__file__).with_name("moved_rows.cu")
    headers: ClassVar[tuple[str, ...]] = ("te_cuda.cuh",)

    def constants(self) -> list[str]:
        return [f"constexpr int kThreads = {_THREADS}, kBehind = {_BEHIND};"]


@dataclass(frozen=True)
class FindTokens(_RowKernel):
    """The kernel that finds tokens."""

    name: ClassVar[str] = "find_tokens"

    def native(self, cubin: bytes) -> _native.CudaKernel:
        tensors = [("bool", 1)] * 2 + [("int32", 4)] * 3
        return over_rows(self.name, cubin, tensors, 2, 3, _THREADS, blocks=_BLOCKS)


@dataclass(frozen=True)
class MoveRows(_RowKernel):
    """The kernel that moves rows."""

    dtype: torch.dtype
    name: ClassVar[str] = "move_rows"

    def native(self, cubin: bytes) -> _native.CudaKernel:
        tensors = [("int32", 4)] * 2 + [(_DTYPES[self.dtype], _ACCESS)] * 2
        return over_rows(self.name, cubin, tensors, 3, 8, _THREADS, blocks=_BLOCKS)


_FIND, _MOVE = FindTokens(), {dtype: MoveRows(dtype) for dtype in _DTYPES}


_MOVED = f"{PADDED} is told by moving tokens together, "


def why_not_moved(settings: AttentionSettings) -> str | None:
    """Reason why padding cannot be expressed by lengths and offsets."""
    mask, apart = settings.mask, isinstance(settings.heads, ApartHeads)
    alike = not apart or mask.padding == mask.key_padding  # then there are as many keys as queries
    if mask.counts:
        return f"{_MOVED}and sequences have lengths or offsets as well"
    if mask.window is not None or mask.corner == "bottom_right" and mask.is_banded and not alike:
        return f"{_MOVED}which changes how far apart they are, and a window or a corner counts that"
    if mask.causal and not alike:
        return f"{_MOVED}and queries and keys are padded by tensors of two names, so that later keys are not known"
    others = [words for words in settings.scores.beyond if words != SOFT_CAP]
    return f"{_MOVED}and it is not called for {' and '.join(others)} so" if others else None


def reason_not(provider: Provider, problem: AttentionProblem) -> str | None:
    """Reason why a provider told the structure cannot compute a problem with padding."""
    reason = why_not_moved(problem.settings)
    if reason is not None:
        return reason
    by_lengths, by_offsets = _told(problem.settings)
    rows = problem.samples * problem.positions
    keys = None if problem.keys is None else problem.samples * problem.keys
    moved = replace(problem, settings=by_offsets, samples=1, positions=rows, keys=keys)
    if BY_OFFSETS not in provider.beyond:
        return f"{_MOVED}and it is not called for {BY_OFFSETS}"
    return provider.reason_not(moved) or provider.reason_not(replace(problem, settings=by_lengths))


@functools.lru_cache(maxsize=512)  # in each call
def _told(settings: AttentionSettings, longest: int | None = None) -> tuple[AttentionSettings, AttentionSettings]:
    """Settings of samples without gaps, and of tokens that were moved."""
    mask, heads = settings.mask, settings.heads
    alike = mask.padding == mask.key_padding
    apart = isinstance(heads, ApartHeads)
    by_lengths = AttentionMask(
        causal=mask.causal, lengths="lengths", key_lengths=("lengths" if alike else "key_lengths") if apart else None
    )
    by_offsets = AttentionMask(
        causal=mask.causal,
        offsets="offsets",
        key_offsets="key_offsets" if apart and not alike else None,
        longest=longest,
    )
    tokens = replace(heads, layout="batch_first")
    return replace(settings, mask=by_lengths), replace(settings, mask=by_offsets, heads=tokens)


@dataclass(frozen=True)
class Padded:
    """A provider, called for padding; `rows` moves them."""

    provider: Provider
    rows: type[CompactByTorch] | type[CompactByKernel]

    def forward(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank | None, random: RandomStream | None = None
    ) -> tuple[torch.Tensor, Saved]:
        """The output, and for each name in `emits` what both calls gave, [2, ..]."""
        whole = HeadsCall.of(settings, tensors)
        if whole.is_empty:
            return self.provider.nothing(whole)
        call = _PaddedCalls.of(whole, tensors, self.rows)
        y, front = self.provider.forward(call.by_lengths, call.front, blank)
        made, behind = self.provider.forward(call.by_offsets, call.together(whole.inputs), None)
        call.back(made, "input", y)
        return y, {name: _pair(tensor, behind[name]) for name, tensor in front.items()}

    def backward(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank | None) -> Saved:
        """The gradients by input."""
        whole = HeadsCall.of(settings, tensors)
        if whole.is_empty:
            return whole.zeros()
        call, y = _PaddedCalls.of(whole, tensors, self.rows), tensors["output"]
        assert y is not None
        pairs = {name: pair for name in self.provider.emits if (pair := tensors[name]) is not None}
        front = {**call.front, "output": y, **{name: pair[0] for name, pair in pairs.items()}}
        found = self.provider.backward(call.by_lengths, front, dy, blank)
        rows = [settings.heads.heads, call.queries.places.numel()]
        logs = {name: pair[1].view(rows) if name.endswith("logsumexp") else pair[1] for name, pair in pairs.items()}
        moved = {**call.together({**whole.inputs, "output": y}), **logs}
        moved_dy = call.moved(dy, "input")
        if self.provider.packs:
            made = self.provider.backward(call.by_offsets, moved, moved_dy, None)
            for name, gradient in made.items():
                call.back(gradient, name, found[name])
            return found
        parts = self.provider.gradients_of_rows(call.by_offsets, moved, moved_dy)
        call.back_heads(parts, split_inputs(settings.heads, [found[name] for name in whole.inputs]))
        return found


@dataclass(frozen=True)
class _PaddedCalls:
    """Pair of calls: by lengths of the tensors `front`, and by offsets of moved ones."""

    by_lengths: AttentionSettings
    by_offsets: AttentionSettings
    front: dict[str, torch.Tensor | None]
    queries: Tokens
    keys: Tokens | None
    rows: type[CompactByTorch] | type[CompactByKernel]

    @classmethod
    def of(cls, whole: HeadsCall, tensors: Tensors, rows: type[CompactByTorch] | type[CompactByKernel]) -> _PaddedCalls:
        """Build the pair of a call with masks of padding."""
        q, k, _ = whole.heads
        keys = k.shape[2] if isinstance(whole.settings.heads, ApartHeads) else None
        queries, others = rows.find(tensors.get("padding"), tensors.get("key_padding"), q.shape[2], keys)
        front: dict[str, torch.Tensor | None] = {**whole.inputs, "lengths": queries.lengths}
        if others is not None:
            front["key_lengths"] = others.lengths
        return cls(*_told(whole.settings, max(q.shape[2], keys or 0)), front, queries, others, rows)

    def moved(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """Rows of a tensor with the positions of that input."""
        return self.rows.together(self._by_sample(tensor), self._tokens(name))

    def together(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Rows of inputs, or of the output, and where sequences begin."""
        found: dict[str, torch.Tensor | None] = {name: self.moved(t, name) for name, t in tensors.items()}
        found["offsets"] = self.queries.offsets
        if self.keys is not None and self.by_offsets.mask.key_offsets is not None:
            found["key_offsets"] = self.keys.offsets
        return found

    def back(self, rows: torch.Tensor, name: str, to: torch.Tensor) -> None:
        """Rows with the positions of that input to where they stand."""
        self.rows.back(rows, self._tokens(name), self._by_sample(to)[:, :, None])

    def back_heads(self, parts: Gradients, to: Gradients) -> None:
        """Put heads of tokens q [1, H, T, D], k and v [1, G, T, D] where queries and keys stand."""
        names = ("input", "key", "value")
        for name, part, heads in zip(names, parts, to, strict=True):
            apart = heads if heads.dim() == 5 else heads[:, :, None]  # [B, G, R, S, D]
            rows = part[0].transpose(0, 1).flatten(1)
            self.rows.back(rows, self._tokens(name), apart.permute(0, 3, 1, 2, 4).flatten(3))

    def _by_sample(self, tensor: torch.Tensor) -> torch.Tensor:
        """[B, S, F]."""
        return tensor.transpose(0, 1) if self.by_lengths.heads.layout == "sequence_first" else tensor

    def _tokens(self, name: str) -> Tokens:
        return self.queries if self.keys is None or name in ("input", "output") else self.keys


def _pair(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[2, ..]; of seeds, which PyTorch does not put together, as signed numbers."""
    if one.dtype == torch.uint64:
        return torch.stack((one.view(torch.int64), other.view(torch.int64))).view(torch.uint64)
    return torch.stack((one, other.view(one.shape)))

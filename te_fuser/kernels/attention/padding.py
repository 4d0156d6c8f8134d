"""Padding by boolean tensors for kernels that are told lengths and offsets, without a dense mask.

Attention does not ask where tokens stand, only which of them a query sees. So samples whose tokens stand in front are
told by lengths, and the tokens of others are moved together, which keeps their order, and told by offsets. Each is a
call of its own, as only the device knows which sample is which; where no sample has gaps, the second finds no sequence.

Letters of shapes are those of `moved_rows.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from te_fuser.kernels.attention.blank_rows import Blank
from te_fuser.kernels.attention.moved_rows import CompactByKernel, CompactByTorch, Tokens
from te_fuser.kernels.attention.problem import AttentionProblem
from te_fuser.kernels.attention.provider import Provider, Saved
from te_fuser.kernels.attention.separate import Separate, Tensors
from te_fuser.kernels.attention.views import Gradients
from te_fuser.ops.attention.dot_product_attention import AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads, split_inputs
from te_fuser.ops.attention.mask import BY_OFFSETS, PADDED, AttentionMask
from te_fuser.ops.attention.scores import SOFT_CAP

_MOVED = f"{PADDED} is told by moving tokens together, "


def why_not_moved(settings: AttentionSettings) -> str | None:
    """Why padding cannot be told by lengths and offsets; None when it can."""
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
    """Why a provider that is told the structure cannot compute a problem with padding; None when it can."""
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
    """What is computed of samples without gaps, and of tokens that were moved."""
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

    def forward_separate(
        self, settings: AttentionSettings, tensors: Tensors, blank: Blank
    ) -> tuple[torch.Tensor, Saved]:
        """The output, and for each name in `emits` what both calls gave, [2, ..]."""
        whole = Separate.of(settings, tensors)
        if whole.is_empty:
            return self.provider.nothing(whole)
        call = _PaddedCalls.of(whole, tensors, self.rows)
        y, front = self.provider.forward_separate(call.by_lengths, call.front, blank)
        made, behind = self.provider.forward_separate(call.by_offsets, call.together(whole.inputs), None)
        call.back(made, "input", y)
        return y, {name: _pair(tensor, behind[name]) for name, tensor in front.items()}

    def backward_separate(self, settings: AttentionSettings, tensors: Tensors, dy: torch.Tensor, blank: Blank) -> Saved:
        """The gradients by input."""
        whole = Separate.of(settings, tensors)
        if whole.is_empty:
            return whole.zeros()
        call, y = _PaddedCalls.of(whole, tensors, self.rows), tensors["output"]
        assert y is not None
        pairs = {name: pair for name in self.provider.emits if (pair := tensors[name]) is not None}
        front = {**call.front, "output": y, **{name: pair[0] for name, pair in pairs.items()}}
        found = self.provider.backward_separate(call.by_lengths, front, dy, blank)
        rows = [settings.heads.heads, call.queries.places.numel()]
        logs = {name: pair[1].view(rows) if name.endswith("logsumexp") else pair[1] for name, pair in pairs.items()}
        moved = {**call.together({**whole.inputs, "output": y}), **logs}
        moved_dy = call.moved(dy, "input")
        if self.provider.packs:
            made = self.provider.backward_separate(call.by_offsets, moved, moved_dy, None)
            for name, gradient in made.items():
                call.back(gradient, name, found[name])
            return found
        parts = self.provider.gradients_separate(call.by_offsets, moved, moved_dy)
        call.back_heads(parts, split_inputs(settings.heads, [found[name] for name in whole.inputs]))
        return found


@dataclass(frozen=True)
class _PaddedCalls:
    """Both calls: what is computed by lengths of the tensors `front`, and by offsets of those that are moved."""

    by_lengths: AttentionSettings
    by_offsets: AttentionSettings
    front: dict[str, torch.Tensor | None]
    queries: Tokens
    keys: Tokens | None
    rows: type[CompactByTorch] | type[CompactByKernel]

    @classmethod
    def of(cls, whole: Separate, tensors: Tensors, rows: type[CompactByTorch] | type[CompactByKernel]) -> _PaddedCalls:
        """Of a call with masks of padding."""
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
        """Heads of tokens q [1, H, T, D], k and v [1, G, T, D] to where those of queries and of keys stand."""
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
    """[2, ..]; of seeds, which PyTorch does not put together, as whole numbers with a sign."""
    if one.dtype == torch.uint64:
        return torch.stack((one.view(torch.int64), other.view(torch.int64))).view(torch.uint64)
    return torch.stack((one, other.view(one.shape)))

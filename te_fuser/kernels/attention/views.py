"""The way between packed heads and what the kernels of attention take, without copies where strides allow it.

Legend: B samples, S positions, G key/value heads, R query heads of each, H = G * R, D features of a head;
b, h, g: the kernel's batch, query heads and key/value heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Protocol

import torch

from te_fuser.ops.attention.dot_product_attention import AttentionSettings
from te_fuser.ops.attention.heads import PackedHeads

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Sizes, strides and offset of heads [b, h, S, D] in the contiguous tensor that they lie in.
HeadsForm = tuple[tuple[int, ...], tuple[int, ...], int]
_FORMS_KEPT = 512


def lead(settings: AttentionSettings, samples: int) -> tuple[int, int, int]:
    """How (B, G, R) become a kernel's (b, h, g) without a copy, as far as the layout allows.

    Where samples and heads lie at one stride they are all heads, and the output comes out in the op's layout; where
    only samples and groups do, those are the batch. A mask needs samples and heads apart.
    """
    heads = settings.heads
    groups, per_group = heads.kv_heads, heads.per_group
    packed = isinstance(heads, PackedHeads) and heads.packing == "interleaved"
    one_stride = packed and (heads.layout == "sequence_first" or samples == 1)
    if settings.masked or not one_stride:
        return samples, heads.heads, groups
    return (1, samples * groups, samples * groups) if per_group == 1 else (samples * groups, per_group, 1)


def has_one_stride(settings: AttentionSettings, samples: int) -> bool:
    """Whether the query heads of a packed tensor have one stride, as `lead` says them."""
    heads = settings.packed
    if heads.packing == "blocked" or not 1 < heads.kv_heads < heads.heads:
        return True
    return not settings.masked and (heads.layout == "sequence_first" or samples == 1)


def packed_forms(settings: AttentionSettings, samples: int, positions: int) -> tuple[HeadsForm, HeadsForm, HeadsForm]:
    """Where q [b, h, S, D], k and v [b, g, S, D] lie in a contiguous packed tensor.

    Raises:
        RuntimeError: for query heads of groups that have no common stride.
    """
    heads = settings.packed
    b, h, g = lead(settings, samples)
    packed = torch.empty(*heads.leading(samples, positions), heads.features, device="meta")
    q, k, v = (
        _form(part.view(b, number, positions, heads.head_dim))
        for part, number in zip(heads.split(packed), (h, g, g), strict=True)
    )
    return q, k, v


def output_form(settings: AttentionSettings, samples: int, positions: int) -> HeadsForm:
    """Where heads [b, h, S, D] lie in a contiguous output."""
    heads = settings.packed
    b, h, _ = lead(settings, samples)
    y = torch.empty(*heads.leading(samples, positions), heads.heads * heads.head_dim, device="meta")
    return _form(heads.split_output(y).view(b, h, positions, heads.head_dim))


def lying(tensor: torch.Tensor, form: HeadsForm) -> torch.Tensor:
    """The heads that lie so in a contiguous tensor: one view, where a way by its dimensions takes several."""
    sizes, strides, offset = form
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def _form(t: torch.Tensor) -> HeadsForm:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


def _turned(form: HeadsForm) -> HeadsForm:
    """Positions before heads."""
    (b, h, length, dim), (batch, head, position, along), offset = form
    return (b, length, h, dim), (batch, position, head, along), offset


@dataclass(frozen=True)
class Views:
    """The way between packed tensors and a kernel's [b, h, S, D]; `views_of` has those of sizes that came before."""

    settings: AttentionSettings
    samples: int
    positions: int

    @property
    def order(self) -> tuple[int, ...]:
        """[B, G, R, S, D] -> the op's layout."""
        return (3, 0, 1, 2, 4) if self.settings.heads.layout == "sequence_first" else (0, 3, 1, 2, 4)

    @functools.cached_property
    def packed(self) -> tuple[HeadsForm, HeadsForm, HeadsForm]:
        """Where queries, keys and values lie in a contiguous packed tensor.

        Raises:
            RuntimeError: for query heads of groups that have no common stride.
        """
        return packed_forms(self.settings, self.samples, self.positions)

    @functools.cached_property
    def output(self) -> HeadsForm:
        """Where heads lie in a contiguous output."""
        return output_form(self.settings, self.samples, self.positions)

    @functools.cached_property
    def output_shape(self) -> tuple[int, int, int]:
        """That of the op's output."""
        heads = self.settings.packed
        return (*heads.leading(self.samples, self.positions), heads.heads * heads.head_dim)

    @functools.cached_property
    def _output_stride(self) -> tuple[int, int, int]:
        _, second, features = self.output_shape
        return second * features, features, 1

    @functools.cached_property
    def _one_stride(self) -> bool:
        return has_one_stride(self.settings, self.samples)

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q [b, h, S, D], k and v [b, g, S, D]; views, except for query heads of groups that have no common stride."""
        if self._one_stride and qkv.is_contiguous():
            return self.within(qkv)
        q, k, v = self.settings.packed.split(qkv)
        b, h, g = lead(self.settings, self.samples)
        return q.reshape(b, h, *q.shape[3:]), k.reshape(b, g, *k.shape[2:]), v.reshape(b, g, *v.shape[2:])

    def within(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same of a contiguous tensor, always views, so that a kernel can store there.

        Raises:
            RuntimeError: for query heads of groups that have no common stride.
        """
        q, k, v = self.packed
        return lying(qkv, q), lying(qkv, k), lying(qkv, v)

    def by_position(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `within`, with positions before heads: q [b, S, h, D], k and v [b, S, g, D]."""
        q, k, v = self._packed_by_position
        return lying(qkv, q), lying(qkv, k), lying(qkv, v)

    @functools.cached_property
    def _packed_by_position(self) -> tuple[HeadsForm, HeadsForm, HeadsForm]:
        q, k, v = self.packed
        return _turned(q), _turned(k), _turned(v)

    def output_by_position(self, y: torch.Tensor) -> torch.Tensor:
        """As `split_output`, [b, S, h, D]."""
        return lying(y.contiguous(), self._output_by_position)

    @functools.cached_property
    def _output_by_position(self) -> HeadsForm:
        return _turned(self.output)

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output or its gradient as [b, h, S, D], features side by side."""
        return lying(y.contiguous(), self.output)

    def merge_output(self, out: torch.Tensor) -> torch.Tensor:
        """[b, h, S, D] as the op's output."""
        if out.stride() == self.output[1]:
            # Detached it is no view to autograd: it stands for its own storage, as an output of an op must.
            return out.as_strided(self.output_shape, self._output_stride).detach()
        return self.settings.heads.merge_output(self._grouped(out, self.settings.heads.per_group))

    def grouped(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> Gradients:
        """The kernel's [b, h, S, D] as queries [B, G, R, S, D], keys and values [B, G, S, D]; views."""
        dq = self._grouped(dq, self.settings.heads.per_group)
        return dq, self._grouped(dk, 1).squeeze(2), self._grouped(dv, 1).squeeze(2)

    def pack(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The gradient of the packed input: one concatenation where all three lie in its order, else three copies."""
        heads = self.settings.packed
        parts = [part.permute(self.order) for part in (dq, dk.unsqueeze(2), dv.unsqueeze(2))]
        if dq.dtype != dtype or not all(part.is_contiguous() for part in parts):
            return heads.pack(dq, dk, dv, dtype)
        rows = self.samples * self.positions * (heads.kv_heads if heads.packing == "interleaved" else 1)
        packed = torch.cat([part.view(rows, -1) for part in parts], 1)
        return torch.ops.aten._unsafe_view.default(packed, [*parts[0].shape[:2], heads.features])

    def _grouped(self, part: torch.Tensor, per_group: int) -> torch.Tensor:
        return part.view(self.samples, self.settings.heads.kv_heads, per_group, self.positions, part.shape[-1])


@functools.lru_cache(maxsize=_FORMS_KEPT)
def views_of(settings: AttentionSettings, shape: torch.Size) -> Views:
    """The views of packed heads of that shape."""
    return Views(settings, *settings.heads.lengths(shape))


class Sized(Protocol):
    """What is computed, and for how many queries."""

    @property
    def settings(self) -> AttentionSettings: ...
    @property
    def positions(self) -> int: ...


@dataclass(frozen=True)
class AttentionInputs:
    """What a kernel is given: q [b, h, S, D], k and v [b, g, K, D], and what it adds to the scores, if anything."""

    views: Sized
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    causal: bool

    @property
    def settings(self) -> AttentionSettings:
        """What is computed."""
        return self.views.settings

    @property
    def positions(self) -> int:
        """S."""
        return self.views.positions

    @property
    def keys(self) -> int:
        """K; as many as queries where they are packed."""
        return self.k.shape[2]

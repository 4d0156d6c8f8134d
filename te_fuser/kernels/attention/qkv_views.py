"""The way between the inputs of an attention and what its kernels take, without copies where strides allow it.

Legend: B samples, S positions, K keys, G key/value heads, R query heads of each, H = G * R, D features of a head, E of
a value's; b, h, g: the kernel's batch, query heads and key/value heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from te_fuser.ops.attention.dot_product_attention import AttentionSettings, hidden_positions
from te_fuser.ops.attention.heads import ApartHeads, PackedHeads, inputs_of, of_layout, pack_gradients, split_inputs
from te_fuser.ops.attention.mask import Band
from te_fuser.record import record

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
# Sizes, strides and offset of heads [b, h, S, D] in the contiguous tensor that they lie in.
HeadsForm = tuple[tuple[int, ...], tuple[int, ...], int]
_FORMS_KEPT = 512


def lead(settings: AttentionSettings, samples: int) -> tuple[int, int, int]:
    """(B, G, R) as a kernel's (b, h, g), without a copy as far as the layout allows.

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
    """True where the query heads of a packed tensor have one stride, as `lead` says them."""
    heads = settings.packed
    if heads.packing == "blocked" or not 1 < heads.kv_heads < heads.heads:
        return True
    return not settings.masked and (heads.layout == "sequence_first" or samples == 1)


def packed_forms(settings: AttentionSettings, samples: int, positions: int) -> tuple[HeadsForm, HeadsForm, HeadsForm]:
    """Forms of q [b, h, S, D], k and v [b, g, S, D] in a contiguous packed tensor."""
    heads = settings.packed
    b, h, g = lead(settings, samples)
    packed = torch.empty(*heads.leading(samples, positions), heads.features, device="meta")
    q, k, v = (
        _form(part.view(b, number, positions, heads.head_dim))
        for part, number in zip(heads.split(packed), (h, g, g), strict=True)
    )
    return q, k, v


def output_form(settings: AttentionSettings, samples: int, positions: int) -> HeadsForm:
    """Form of heads [b, h, S, D] in a contiguous output."""
    heads = settings.packed
    b, h, _ = lead(settings, samples)
    y = torch.empty(*heads.leading(samples, positions), heads.heads * heads.head_dim, device="meta")
    return _form(heads.split_output(y).view(b, h, positions, heads.head_dim))


def lying(tensor: torch.Tensor, form: HeadsForm) -> torch.Tensor:
    """The heads that lie so in a contiguous tensor, by one view."""
    sizes, strides, offset = form
    return tensor.as_strided(sizes, strides, tensor.storage_offset() + offset)


def _form(t: torch.Tensor) -> HeadsForm:
    return tuple(t.shape), t.stride(), int(t.storage_offset())


@dataclass(frozen=True)
class Views:
    """The way between packed tensors and a kernel's [b, h, S, D]."""

    settings: AttentionSettings
    samples: int
    positions: int

    @property
    def order(self) -> tuple[int, ...]:
        """[B, G, R, S, D] -> the op's layout."""
        return (3, 0, 1, 2, 4) if self.settings.heads.layout == "sequence_first" else (0, 3, 1, 2, 4)

    @functools.cached_property
    def packed(self) -> tuple[HeadsForm, HeadsForm, HeadsForm]:
        """Forms of queries, keys and values in a contiguous packed tensor."""
        return packed_forms(self.settings, self.samples, self.positions)

    @functools.cached_property
    def output(self) -> HeadsForm:
        """Form of heads in a contiguous output."""
        return output_form(self.settings, self.samples, self.positions)

    @functools.cached_property
    def output_shape(self) -> tuple[int, int, int]:
        """Shape of the op's output."""
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
        """q [b, h, S, D], k and v [b, g, S, D]; copies of query heads without a common stride."""
        if self._one_stride and qkv.is_contiguous():
            return self.within(qkv)
        q, k, v = self.settings.packed.split(qkv)
        b, h, g = lead(self.settings, self.samples)
        return q.reshape(b, h, *q.shape[3:]), k.reshape(b, g, *k.shape[2:]), v.reshape(b, g, *v.shape[2:])

    def within(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Heads of a contiguous tensor, as views in which a kernel can store."""
        q, k, v = self.packed
        return lying(qkv, q), lying(qkv, k), lying(qkv, v)

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
        """Queries [B, G, R, S, D], keys and values [B, G, S, D]; views."""
        dq = self._grouped(dq, self.settings.heads.per_group)
        return dq, self._grouped(dk, 1).squeeze(2), self._grouped(dv, 1).squeeze(2)

    def pack(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Gradient of the packed input: one concatenation in order, else three copies."""
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


@record(eq=False)  # made in each call
class AttentionInputs:
    """Inputs of a kernel: q [b, h, S, D], k and v [b, g, K, D], and what is added to the scores."""

    settings: AttentionSettings
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    bias: torch.Tensor | None
    causal: bool

    @property
    def positions(self) -> int:
        """S."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """K; as many as queries where they are packed."""
        return self.k.shape[2]


Tensors = Mapping[str, "torch.Tensor | None"]
Readable = Callable[[torch.Tensor], torch.Tensor]


@record(eq=False)  # made in each call
class HeadsCall:
    """A call: inputs by name, and their heads q [B, H, S, D], k [B, G, K, D], v [B, G, K, E]."""

    settings: AttentionSettings
    inputs: Mapping[str, torch.Tensor]
    heads: Gradients

    @classmethod
    def of(cls, settings: AttentionSettings, tensors: Tensors, readable: Readable = lambda x: x) -> HeadsCall:
        """The call of these tensors, `readable` for a kernel."""
        inputs = {}
        for name in inputs_of(settings.heads):
            tensor = tensors[name]
            assert tensor is not None
            inputs[name] = tensor.detach()  # views by a split ask for gradients, also without grad mode
        q, k, v = split_inputs(settings.heads, [*inputs.values()])
        return cls(settings, inputs, (readable(q.flatten(1, 2)), readable(k), readable(v)))

    @classmethod
    def on_meta(
        cls, settings: AttentionSettings, samples: int, positions: int, keys: int, dtype: torch.dtype
    ) -> HeadsCall:
        """A call of those sizes, of which only where heads lie is known."""
        heads = settings.heads
        counts = {name: keys if name != "input" else positions for name in inputs_of(heads)}
        made = {}
        for name, count in counts.items():
            features = heads.features_of(name) if isinstance(heads, ApartHeads) and name != "input" else heads.features
            made[name] = torch.empty(*heads.leading(samples, count), features, dtype=dtype, device="meta")
        return cls.of(settings, made)

    @property
    def is_empty(self) -> bool:
        """True where a kernel has nothing to do."""
        q, k, v = self.heads
        return not (q.numel() and k.numel() and v.numel())

    def hidden(self, tensors: Tensors, beside: bool) -> tuple[torch.Tensor | None, bool]:
        """Mask of what the kernel has to hide, [B or 1, H or 1, S or 1, K or 1], and whether it hides later positions.

        `beside`: it does so for packed heads beside a given mask.
        """
        q, k, _ = self.heads
        if self.settings.is_causal:
            return None, True
        apart = isinstance(self.settings.heads, ApartHeads)
        band = Band.of(self.settings.mask, tensors, (q.shape[2], k.shape[2]), apart, q.device)
        return band.with_given(tensors.get("attention_mask")), False

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, S, E] as the op's output."""
        x, lead = self.inputs["input"], self.settings.heads
        grouped = heads.unflatten(1, (lead.kv_heads, lead.per_group))
        return of_layout(lead.merge_output(grouped.to(x.dtype)), x.dim())

    def memory(self) -> torch.Tensor:
        """Uninitialized memory for the output."""
        x, heads = self.inputs["input"], self.settings.heads
        return x.new_empty((*x.shape[:-1], heads.heads * heads.value_dim))

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output or its gradient as [B, H, S, E]."""
        return self.settings.heads.split_output(y[None] if y.dim() == 2 else y).flatten(1, 2)

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> dict[str, torch.Tensor]:
        """Gradients that the kernel gives, by input."""
        heads = self.settings.heads
        parts: Gradients = (dq.unflatten(1, (heads.kv_heads, heads.per_group)), dk, dv)
        return pack_gradients(heads, parts, self.inputs)

    def targets(self) -> Targets:
        """Memory for the gradients; nothing is in it."""
        inputs = {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in self.inputs.items()}
        q, k, v = split_inputs(self.settings.heads, [*inputs.values()])
        return Targets(inputs, (q.flatten(1, 2), k, v), q)

    def zeros(self) -> dict[str, torch.Tensor]:
        """The gradients where nothing is seen."""
        return {n: torch.zeros_like(t, memory_format=torch.contiguous_format) for n, t in self.inputs.items()}


@record(eq=False)  # made in each call
class PackedCall(HeadsCall):
    """Call of packed heads that no structure hides, in a kernel's order as `lead` says."""

    views: Views

    @classmethod
    def of(cls, settings: AttentionSettings, tensors: Tensors, readable: Readable = lambda x: x) -> PackedCall:
        x = tensors["input"]
        assert x is not None
        views = views_of(settings, x.shape)
        return cls(settings, {"input": x}, views.split(readable(x)), views)

    def hidden(self, tensors: Tensors, beside: bool) -> tuple[torch.Tensor | None, bool]:
        causal, mask = self.settings.causal, tensors.get("attention_mask")
        if mask is None:
            return None, causal
        return hidden_positions(causal and not beside, mask, self.views.positions, mask.device), causal and beside

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        y, dtype = self.views.merge_output(heads), self.inputs["input"].dtype
        return y if y.dtype == dtype else y.to(dtype)

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        return self.views.split_output(y)

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"input": self.views.pack(*self.views.grouped(dq, dk, dv), dtype=self.inputs["input"].dtype)}

    def targets(self) -> Targets:
        dx = torch.empty_like(self.inputs["input"], memory_format=torch.contiguous_format)
        heads = self.views.within(dx)
        return Targets({"input": dx}, heads, heads[0])


def call_of(settings: AttentionSettings, tensors: Tensors, readable: Readable = lambda x: x) -> HeadsCall:
    """The call of these tensors, whose heads a kernel can read."""
    return (HeadsCall if settings.beyond else PackedCall).of(settings, tensors, readable)


@record(eq=False)  # made in each call
class Targets:
    """Memory for gradients by input, and where a kernel stores those of heads q [B, H, S, D], k and v [B, G, K, D].

    Query heads of several groups that have no common stride are stored beside it, and copied.
    """

    inputs: dict[str, torch.Tensor]
    heads: Gradients
    queries: torch.Tensor

    def stored(self) -> dict[str, torch.Tensor]:
        """The gradients, once the kernel has run."""
        beside = self.heads[0]
        if beside.data_ptr() != self.queries.data_ptr():
            self.queries.copy_(beside.unflatten(1, self.queries.shape[1:3]))
        return self.inputs

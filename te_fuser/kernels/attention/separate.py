"""The way between an attention's inputs and a kernel where heads are not all packed, or structure hides.

Letters of shapes are those of `views.py`; K keys, E features of a value's head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from te_fuser.kernels.attention.views import AttentionInputs, Gradients
from te_fuser.ops.attention.dot_product_attention import AttentionSettings
from te_fuser.ops.attention.heads import ApartHeads, inputs_of, of_layout, pack_gradients, split_inputs
from te_fuser.ops.attention.mask import Band

Tensors = Mapping[str, "torch.Tensor | None"]


@dataclass(frozen=True)
class Separate:
    """A call: what is computed, its inputs by name, and their heads q [B, H, S, D], k [B, G, K, D], v [B, G, K, E]."""

    settings: AttentionSettings
    inputs: Mapping[str, torch.Tensor]
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, settings: AttentionSettings, tensors: Tensors) -> Separate:
        """The call of these tensors."""
        inputs = {}
        for name in inputs_of(settings.heads):
            tensor = tensors[name]
            assert tensor is not None
            inputs[name] = tensor.detach()  # views by a split ask for gradients, also without grad mode
        q, k, v = split_inputs(settings.heads, [*inputs.values()])
        return cls(settings, inputs, (q.flatten(1, 2), k, v))

    @classmethod
    def on_meta(
        cls, settings: AttentionSettings, samples: int, positions: int, keys: int, dtype: torch.dtype
    ) -> Separate:
        """A call of those sizes, of which only where heads lie is known."""
        heads = settings.heads
        counts = {name: keys if name != "input" else positions for name in inputs_of(heads)}
        made = {}
        for name, count in counts.items():
            features = heads.features_of(name) if isinstance(heads, ApartHeads) and name != "input" else heads.features
            made[name] = torch.empty(*heads.leading(samples, count), features, dtype=dtype, device="meta")
        return cls.of(settings, made)

    @property
    def positions(self) -> int:
        """S."""
        return self.heads[0].shape[2]

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing for a kernel to do."""
        return not all(part.numel() for part in self.heads)

    def hidden(self, tensors: Tensors) -> torch.Tensor | None:
        """What the kernel has to be told is hidden, [B or 1, H or 1, S or 1, K or 1]; None: nothing but `causal`."""
        q, k, _ = self.heads
        if self.settings.is_causal:
            return None
        apart = isinstance(self.settings.heads, ApartHeads)
        band = Band.of(self.settings.mask, tensors, (q.shape[2], k.shape[2]), apart, q.device)
        return band.with_given(tensors.get("attention_mask"))

    def call(self, bias: torch.Tensor | None) -> AttentionInputs:
        """As a kernel is called."""
        return AttentionInputs(self, *self.heads, bias=bias, causal=self.settings.is_causal)

    def output(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, S, E] as the op's output."""
        x, lead = self.inputs["input"], self.settings.heads
        grouped = heads.unflatten(1, (lead.kv_heads, lead.per_group))
        return of_layout(lead.merge_output(grouped.to(x.dtype)), x.dim())

    def memory(self) -> torch.Tensor:
        """For the output."""
        x, heads = self.inputs["input"], self.settings.heads
        return x.new_empty((*x.shape[:-1], heads.heads * heads.value_dim))

    def nothing(self) -> torch.Tensor:
        """The output where nothing is seen."""
        return self.memory().zero_()

    def split_output(self, y: torch.Tensor) -> torch.Tensor:
        """The output or its gradient as [B, H, S, E]."""
        return self.settings.heads.split_output(y[None] if y.dim() == 2 else y).flatten(1, 2)

    def gradients(self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> dict[str, torch.Tensor]:
        """The kernel's, by input."""
        heads = self.settings.heads
        parts: Gradients = (dq.unflatten(1, (heads.kv_heads, heads.per_group)), dk, dv)
        return pack_gradients(heads, parts, self.inputs)

    def zeros(self) -> dict[str, torch.Tensor]:
        """The gradients where nothing is seen."""
        return {n: torch.zeros_like(t, memory_format=torch.contiguous_format) for n, t in self.inputs.items()}


@dataclass(frozen=True)
class Targets:
    """Memory for gradients by input, and where a kernel stores those of heads q [B, H, S, D], k and v [B, G, K, D].

    Query heads of several groups that have no common stride are stored beside it, and copied.
    """

    inputs: dict[str, torch.Tensor]
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    queries: torch.Tensor

    @classmethod
    def of(cls, call: Separate) -> Targets:
        """For a call; nothing is in it."""
        inputs = {n: torch.empty_like(t, memory_format=torch.contiguous_format) for n, t in call.inputs.items()}
        q, k, v = split_inputs(call.settings.heads, [*inputs.values()])
        return cls(inputs, (q.flatten(1, 2), k, v), q)

    def stored(self) -> dict[str, torch.Tensor]:
        """The gradients, once the kernel has run."""
        beside = self.heads[0]
        if beside.data_ptr() != self.queries.data_ptr():
            self.queries.copy_(beside.unflatten(1, self.queries.shape[1:3]))
        return self.inputs

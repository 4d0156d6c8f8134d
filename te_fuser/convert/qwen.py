"""Qwen's layers: Llama's, with a window in some; Qwen2 has biases of queries, keys and values, Qwen3 norms of heads."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from te_fuser import ops
from te_fuser.convert.layer_ops import LayerParts, why_left
from te_fuser.convert.llama import LlamaLike

_NORMS = ("q_norm", "k_norm")


class Windowed(LlamaLike):
    """A layer whose attention has a window, or None."""

    def function_options(self) -> dict[str, Any]:
        return {**super().function_options(), "sliding_window": self._attention().sliding_window}


class Qwen2DecoderLayer(Windowed, qwen2.Qwen2DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = qwen2.Qwen2DecoderLayer
    attention_class = qwen2.Qwen2Attention
    norm_class = qwen2.Qwen2RMSNorm
    mlp_class = qwen2.Qwen2MLP


class HeadNorms(Windowed):
    """A layer that norms query and key heads before they are turned."""

    def norm_heads(self, parts: LayerParts) -> list[nn.Module]:
        for name in _NORMS:
            parts.note_eps(parts.module(f"self_attn.{name}"))
        if self.attention_left() is not None:
            return []
        norm: Any = self.norm_op(parts.module("self_attn.q_norm"))
        how = {"eps": norm.eps, "zero_centered_gamma": norm.zero_centered_gamma}
        op = ops.HeadNorm(**self._heads_are(), **how, packing="blocked", device="meta")
        names = {"weight": "self_attn.q_norm.weight", "key_weight": "self_attn.k_norm.weight"}
        return [ops.Bound(op, self, **names)]

    def attention_left(self) -> str | None:
        norms = {name: self._attention()._modules[name] for name in _NORMS}
        for name, norm in norms.items():
            why = why_left(norm, self.norm_class)
            if why is not None:
                return f"of its {name}: {why}"
        if len({self.norm_op(norm).eps for norm in norms.values()}) > 1:  # type: ignore[attr-defined]
            return "its norms of heads differ in eps"
        return super().attention_left()


class Qwen3DecoderLayer(HeadNorms, qwen3.Qwen3DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = qwen3.Qwen3DecoderLayer
    attention_class = qwen3.Qwen3Attention
    norm_class = qwen3.Qwen3RMSNorm
    mlp_class = qwen3.Qwen3MLP


BLOCKS = (Qwen2DecoderLayer, Qwen3DecoderLayer)

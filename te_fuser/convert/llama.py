"""Layers of Llama and Mistral: RMSNorm, rotary positions, grouped queries, a gated MLP; a base of other families."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral

from te_fuser import ops
from te_fuser.convert.activations import gate_for
from te_fuser.convert.block import DecoderBlock
from te_fuser.convert.call import LayerCall
from te_fuser.convert.layer_ops import LayerParts, Theirs
from te_fuser.ops.base import FusableOperation

_QUERIES_KEYS_VALUES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


class LlamaLike(DecoderBlock):
    """x + attend(norm(x)), then x + down(act(gate(norm(x))) * up(norm(x)))."""

    norm_class: ClassVar[Any]
    mlp_class: ClassVar[Any]

    def by_module(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        y, _ = self._attention()(hidden_states=x, **call.arguments)
        return y  # type: ignore[no-any-return]

    # --------------------------------------------------------------------------------------- lists

    def norm_before(self, parts: LayerParts) -> list[nn.Module]:
        return self.norm(parts, "input_layernorm")

    def front(self, parts: LayerParts) -> list[nn.Module]:
        turn = ops.RotaryByAngles(cos_sin=("cos", "sin"), layout="batch_first", packing="blocked", **self._heads_are())
        return [*parts.linear(*_QUERIES_KEYS_VALUES), *self.norm_heads(parts), turn]

    def norm_heads(self, parts: LayerParts) -> list[nn.Module]:
        """The norms of query and key heads; most have none."""
        return []

    def project(self, parts: LayerParts) -> list[nn.Module]:
        return parts.linear("self_attn.o_proj")

    def back(self, parts: LayerParts) -> list[nn.Module]:
        norm = self.norm(parts, "post_attention_layernorm")
        return [ops.Add("residual"), ops.Fork("middle"), *norm, *self.mlp_ops(parts), ops.Add("middle")]

    def mlp_ops(self, parts: LayerParts) -> list[nn.Module]:
        """The MLP, its gate and its linear half as one product."""
        mlp: Any = parts.module("mlp")
        if parts.is_left("mlp", self.mlp_class):
            return [Theirs(mlp)]
        gate = gate_for(mlp.act_fn)
        if gate is None:
            parts.left["mlp"] = f"no op gates by its activation, {type(mlp.act_fn).__name__}"
            return [Theirs(mlp)]
        if parts.is_left("mlp.act_fn", type(mlp.act_fn)):
            return [Theirs(mlp)]
        return [*parts.linear("mlp.gate_proj", "mlp.up_proj"), gate, *parts.linear("mlp.down_proj")]

    def norm(self, parts: LayerParts, path: str) -> list[nn.Module]:
        """The norm of that path."""
        return parts.norm(path, self.norm_class, self.norm_op)

    def norm_op(self, norm: Any) -> FusableOperation:
        """Op that computes the family's norm."""
        return ops.RMSNorm(norm.weight.shape[0], norm.variance_epsilon, device="meta")

    # ----------------------------------------------------------------------------------- attention

    def attention_left(self) -> str | None:
        attention, are = self._attention(), self._heads_are()
        for name, heads in (("q_proj", are["heads"]), ("k_proj", are["kv_heads"]), ("v_proj", are["kv_heads"])):
            size = getattr(attention._modules[name], "out_features", None)  # an adapter's may have none
            if size is not None and size != heads * are["head_dim"]:
                return f"its {name} gives {size} features, and its config says {heads} heads of {are['head_dim']}"
        return None

    def settings(self) -> dict[str, Any]:
        attention = self._attention()
        return {**self._heads_are(), "scale": attention.scaling, "dropout": self._dropout()}

    def function_options(self) -> dict[str, Any]:
        return {"scaling": self._attention().scaling, "dropout": self._dropout()}

    def _heads_are(self) -> dict[str, Any]:
        attention = self._attention()
        heads = attention.config.num_attention_heads
        return {"heads": heads, "kv_heads": heads // attention.num_key_value_groups, "head_dim": attention.head_dim}

    def _dropout(self) -> float:
        attention = self._attention()
        return attention.attention_dropout if attention.training else 0.0  # type: ignore[no-any-return]


class LlamaDecoderLayer(LlamaLike, llama.LlamaDecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = llama.LlamaDecoderLayer
    attention_class = llama.LlamaAttention
    norm_class = llama.LlamaRMSNorm
    mlp_class = llama.LlamaMLP


class MistralDecoderLayer(LlamaLike, mistral.MistralDecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = mistral.MistralDecoderLayer
    attention_class = mistral.MistralAttention
    norm_class = mistral.MistralRMSNorm
    mlp_class = mistral.MistralMLP
    of_config = (*LlamaLike.of_config, "sliding_window")

    def function_options(self) -> dict[str, Any]:
        return {
            **super().function_options(),
            "sliding_window": getattr(self._attention().config, "sliding_window", None),
        }


BLOCKS = (LlamaDecoderLayer, MistralDecoderLayer)

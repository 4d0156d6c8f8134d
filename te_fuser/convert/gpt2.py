"""GPT-2's layers: LayerNorm, projections with weights [in, out], GELU, dropout in both branches."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import nn
from transformers.models.gpt2 import modeling_gpt2 as theirs
from transformers.pytorch_utils import Conv1D

from te_fuser import ops
from te_fuser.convert.activations import activation_for
from te_fuser.convert.block import DecoderBlock
from te_fuser.convert.call import LayerCall
from te_fuser.convert.layer_ops import LayerParts, Theirs


class GPT2Block(DecoderBlock, theirs.GPT2Block):
    """transformers' layer, run by lists of ops: x + attend(norm(x)), then x + mlp(norm(x))."""

    was = theirs.GPT2Block
    attention = "attn"
    attention_class = theirs.GPT2Attention

    @classmethod
    def why_not(cls, layer: Any) -> str | None:
        return "it attends to an encoder too" if hasattr(layer, "crossattention") else None

    def by_module(self, x: torch.Tensor, call: LayerCall) -> torch.Tensor:
        y, _ = self._attention()(x, **call.arguments)
        return y  # type: ignore[no-any-return]

    # --------------------------------------------------------------------------------------- lists

    def norm_before(self, parts: LayerParts) -> list[nn.Module]:
        return _norm(parts, "ln_1")

    def front(self, parts: LayerParts) -> list[nn.Module]:
        return _conv(parts, "attn.c_attn")

    def project(self, parts: LayerParts) -> list[nn.Module]:
        return [*_conv(parts, "attn.c_proj"), *_dropout(parts, "attn.resid_dropout")]

    def back(self, parts: LayerParts) -> list[nn.Module]:
        return [ops.Add("residual"), ops.Fork("middle"), *_norm(parts, "ln_2"), *_mlp(parts), ops.Add("middle")]

    # ----------------------------------------------------------------------------------- attention

    def attention_left(self) -> str | None:
        if self._attention().reorder_and_upcast_attn:
            return "it computes scores in a way of its own (reorder_and_upcast_attn)"
        return None

    def settings(self) -> dict[str, Any]:
        attention = self._attention()
        heads = {"heads": attention.num_heads, "kv_heads": attention.num_heads, "head_dim": attention.head_dim}
        return {**heads, "scale": attention.scaling, "dropout": self._attention_dropout()}

    def function_options(self) -> dict[str, Any]:
        return {"scaling": self._attention().scaling, "dropout": self._attention_dropout()}

    def modes(self) -> tuple[Hashable, ...]:
        return tuple(getattr(m, "p", 0.0) if m.training else 0.0 for m in self.settled_by()[1:])

    def settled_by(self) -> list[nn.Module]:
        dropped = (self._attention(), "attn_dropout"), (self._attention(), "resid_dropout"), (self.mlp, "dropout")
        found: list[Any] = [getattr(module, name, None) for module, name in dropped]
        return [*super().settled_by(), *(m for m in found if isinstance(m, nn.Module))]

    def _attention_dropout(self) -> float:
        attention = self._attention()
        return attention.attn_dropout.p if attention.training else 0.0  # type: ignore[no-any-return]


def _norm(parts: LayerParts, path: str) -> list[nn.Module]:
    return parts.norm(path, nn.LayerNorm, lambda m: ops.LayerNorm(m.weight.shape[0], m.eps, device="meta"))


def _conv(parts: LayerParts, path: str) -> list[nn.Module]:
    """A Conv1D: a product with a weight [in, out], and a bias."""
    module: Any = parts.module(path)
    if parts.is_left(path, Conv1D):
        return [Theirs(module)]
    features = module.weight.shape
    product = ops.Bound(ops.MatMul(*features, device="meta"), parts.owner, weight=ops.Transposed(f"{path}.weight"))
    return [product, ops.Bound(ops.Bias(features[1], device="meta"), parts.owner, bias=f"{path}.bias")]


def _dropout(parts: LayerParts, path: str) -> list[nn.Module]:
    module: Any = parts.module(path)
    if parts.is_left(path, nn.Dropout):
        return [Theirs(module)]
    return [ops.Dropout(module.p)] if module.training and module.p > 0 else []


def _mlp(parts: LayerParts) -> list[nn.Module]:
    mlp: Any = parts.module("mlp")
    if parts.is_left("mlp", theirs.GPT2MLP):
        return [Theirs(mlp)]
    activation: nn.Module | None = activation_for(mlp.act)
    if activation is None:
        parts.left["mlp.act"] = f"no op is its activation, {type(mlp.act).__name__}"
    if activation is None or parts.is_left("mlp.act", type(mlp.act)):
        activation = Theirs(mlp.act)
    return [*_conv(parts, "mlp.c_fc"), activation, *_conv(parts, "mlp.c_proj"), *_dropout(parts, "mlp.dropout")]


BLOCKS = (GPT2Block,)

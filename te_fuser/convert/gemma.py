"""Gemma's layers: Llama's, with norms whose factor is 1 + weight.

From Gemma 2 on there are norms before and behind both branches; it has a soft cap of scores, and a window in some
layers. Gemma 3, its language model, has norms of query and key heads in place of the cap.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.gemma import modeling_gemma as gemma
from transformers.models.gemma2 import modeling_gemma2 as gemma2
from transformers.models.gemma3 import modeling_gemma3 as gemma3

from te_fuser import ops
from te_fuser.convert.layer_ops import LayerParts
from te_fuser.convert.llama import LlamaLike
from te_fuser.convert.qwen import HeadNorms
from te_fuser.ops.base import FusableOperation


class GemmaLike(LlamaLike):
    """A layer with Gemma's norms."""

    def norm_op(self, norm: Any) -> FusableOperation:
        return ops.RMSNorm(norm.weight.shape[0], norm.eps, zero_centered_gamma=True, device="meta")


class GemmaDecoderLayer(GemmaLike, gemma.GemmaDecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = gemma.GemmaDecoderLayer
    attention_class = gemma.GemmaAttention
    norm_class = gemma.GemmaRMSNorm
    mlp_class = gemma.GemmaMLP


class FourNorms(GemmaLike):
    """x + norm(attend(norm(x))), then x + norm(mlp(norm(x)))."""

    def back(self, parts: LayerParts) -> list[nn.Module]:
        attended = [*self.norm(parts, "post_attention_layernorm"), ops.Add("residual"), ops.Fork("middle")]
        mlp = [*self.norm(parts, "pre_feedforward_layernorm"), *self.mlp_ops(parts)]
        return [*attended, *mlp, *self.norm(parts, "post_feedforward_layernorm"), ops.Add("middle")]


class Gemma2DecoderLayer(FourNorms, gemma2.Gemma2DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = gemma2.Gemma2DecoderLayer
    attention_class = gemma2.Gemma2Attention
    norm_class = gemma2.Gemma2RMSNorm
    mlp_class = gemma2.Gemma2MLP

    def knows_function(self) -> bool:
        # Of scores with a cap PyTorch's function computes nothing, and what transformers does then is its own matter.
        return super().knows_function() and (self.is_eager() or not self._attention().attn_logit_softcapping)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "soft_cap": self._attention().attn_logit_softcapping or 0.0}

    def function_options(self) -> dict[str, Any]:
        attention = self._attention()
        of_family = {"sliding_window": attention.sliding_window, "softcap": attention.attn_logit_softcapping}
        return {**super().function_options(), **of_family}


class Gemma3DecoderLayer(FourNorms, HeadNorms, gemma3.Gemma3DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = gemma3.Gemma3DecoderLayer
    attention_class = gemma3.Gemma3Attention
    norm_class = gemma3.Gemma3RMSNorm
    mlp_class = gemma3.Gemma3MLP


BLOCKS = (GemmaDecoderLayer, Gemma2DecoderLayer, Gemma3DecoderLayer)

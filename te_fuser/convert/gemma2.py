"""Gemma 2's layers: norms before and behind both branches, a soft cap of scores, and a window in some."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.gemma2 import modeling_gemma2 as theirs

from te_fuser import ops
from te_fuser.convert.gemma import GemmaLike
from te_fuser.convert.layer_ops import LayerParts


class FourNorms(GemmaLike):
    """x + norm(attend(norm(x))), then x + norm(mlp(norm(x)))."""

    def back(self, parts: LayerParts) -> list[nn.Module]:
        attended = [*self.norm(parts, "post_attention_layernorm"), ops.Add("residual"), ops.Fork("middle")]
        mlp = [*self.norm(parts, "pre_feedforward_layernorm"), *self.mlp_ops(parts)]
        return [*attended, *mlp, *self.norm(parts, "post_feedforward_layernorm"), ops.Add("middle")]


class Gemma2DecoderLayer(FourNorms, theirs.Gemma2DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = theirs.Gemma2DecoderLayer
    attention_class = theirs.Gemma2Attention
    norm_class = theirs.Gemma2RMSNorm
    mlp_class = theirs.Gemma2MLP

    def knows_function(self) -> bool:
        # Of scores with a cap PyTorch's function computes nothing, and what transformers does then is its own matter.
        return super().knows_function() and (self.is_eager() or not self._attention().attn_logit_softcapping)

    def settings(self) -> dict[str, Any]:
        return {**super().settings(), "soft_cap": self._attention().attn_logit_softcapping or 0.0}

    def function_options(self) -> dict[str, Any]:
        attention = self._attention()
        of_family = {"sliding_window": attention.sliding_window, "softcap": attention.attn_logit_softcapping}
        return {**super().function_options(), **of_family}


BLOCKS = (Gemma2DecoderLayer,)

"""Gemma's layers: Llama's, with norms whose factor is 1 + weight."""

from __future__ import annotations

from typing import Any

from transformers.models.gemma import modeling_gemma as theirs

from te_fuser import ops
from te_fuser.convert.llama import LlamaLike
from te_fuser.ops.base import FusableOperation


class GemmaLike(LlamaLike):
    """A layer with Gemma's norms."""

    def norm_op(self, norm: Any) -> FusableOperation:
        return ops.RMSNorm(norm.weight.shape[0], norm.eps, zero_centered_gamma=True, device="meta")


class GemmaDecoderLayer(GemmaLike, theirs.GemmaDecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = theirs.GemmaDecoderLayer
    attention_class = theirs.GemmaAttention
    norm_class = theirs.GemmaRMSNorm
    mlp_class = theirs.GemmaMLP


BLOCKS = (GemmaDecoderLayer,)

"""Gemma 3's layers, of its language model: Gemma 2's, with norms of query and key heads in place of the soft cap."""

from __future__ import annotations

from transformers.models.gemma3 import modeling_gemma3 as theirs

from te_fuser.convert.gemma2 import FourNorms
from te_fuser.convert.qwen3 import HeadNorms


class Gemma3DecoderLayer(FourNorms, HeadNorms, theirs.Gemma3DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = theirs.Gemma3DecoderLayer
    attention_class = theirs.Gemma3Attention
    norm_class = theirs.Gemma3RMSNorm
    mlp_class = theirs.Gemma3MLP


BLOCKS = (Gemma3DecoderLayer,)

"""Qwen2's layers: Llama's, with biases of queries, keys and values, and a window in some."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2 import modeling_qwen2 as theirs

from te_fuser.convert.llama import LlamaLike


class Qwen2DecoderLayer(LlamaLike, theirs.Qwen2DecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = theirs.Qwen2DecoderLayer
    attention_class = theirs.Qwen2Attention
    norm_class = theirs.Qwen2RMSNorm
    mlp_class = theirs.Qwen2MLP

    def function_options(self) -> dict[str, Any]:
        return {**super().function_options(), "sliding_window": self._attention().sliding_window}


BLOCKS = (Qwen2DecoderLayer,)

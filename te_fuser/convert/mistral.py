"""Mistral's layers: Llama's, with a window that attention may have."""

from __future__ import annotations

from typing import Any

from transformers.models.mistral import modeling_mistral as theirs

from te_fuser.convert.llama import LlamaLike


class MistralDecoderLayer(LlamaLike, theirs.MistralDecoderLayer):
    """transformers' layer, run by lists of ops."""

    was = theirs.MistralDecoderLayer
    attention_class = theirs.MistralAttention
    norm_class = theirs.MistralRMSNorm
    mlp_class = theirs.MistralMLP
    of_config = (*LlamaLike.of_config, "sliding_window")

    def function_options(self) -> dict[str, Any]:
        return {
            **super().function_options(),
            "sliding_window": getattr(self._attention().config, "sliding_window", None),
        }


BLOCKS = (MistralDecoderLayer,)

"""What presets with heads take: the arguments that attentions and layers share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from te_fuser.ops.attention.head_norm import NORMS
from te_fuser.presets.arguments import check_epsilon, check_size
from te_fuser.presets.norm import Normed


@dataclass(frozen=True)
class HeadsArguments(Normed):
    """What `MultiheadAttention` and `TransformerLayer` take of heads, as the former says."""

    num_gqa_groups: int | None = None
    kv_channels: int | None = None
    bias: bool = True
    set_parallel_mode: bool = False
    fuse_qkv_params: bool = False
    qkv_weight_interleaved: bool = True
    rotary_pos_interleaved: bool = False
    qk_norm_type: str | None = None
    qk_norm_eps: float = 1e-6
    qk_norm_before_rope: bool = False
    softmax_type: str = "vanilla"
    window_size: Any = None
    bottom_right_diagonal: bool | None = None
    layer_number: int | None = None
    layernorm_epsilon: float = 1e-5
    seq_length: int | None = None
    micro_batch_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.qk_norm_type is not None:
            self.choose("qk_norm_type", NORMS)
        for name in ("seq_length", "micro_batch_size", "kv_channels"):
            if getattr(self, name) is not None:
                check_size(name, getattr(self, name))
        for name in ("layernorm_epsilon", "qk_norm_eps"):
            check_epsilon(name, getattr(self, name))


@dataclass(frozen=True)
class MultiheadAttentionArguments(HeadsArguments):
    """What `MultiheadAttention` takes as keywords."""

    attn_mask_type: str = "causal"
    return_bias: bool = False
    input_layernorm: bool = False
    attention_type: str = "self"
    qkv_format: str = "sbhd"
    prefix: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.choose("attention_type", ("self", "cross"))


def channels_of(hidden_size: int, heads: int) -> int:
    """Features of a head where nobody says it.

    Raises:
        ValueError: when there is no whole number of them.
    """
    if hidden_size % heads:
        raise ValueError(f"hidden_size={hidden_size} is no multiple of num_attention_heads={heads}: give kv_channels")
    return hidden_size // heads

"""Keywords of presets' constructors for type checkers and editors, written by `python -m tests.keyword_types`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack as Unpack

from te_fuser.presets.keyword_arguments import Fill


# fmt: off
# ruff: noqa: E701, E702
class PlacementKeywords(TypedDict, total=False):
    params_dtype: torch.dtype | None; device: torch.device | str | None; sequence_parallel: bool | None; tp_group: Any
    tp_size: int; sequence_dim: int; memory: str | int | None; kernels: str | None; fallback: str | None
    verify: bool | None
class CommonKeywords(PlacementKeywords, total=False):
    get_rng_state_tracker: Callable[[], Any] | None; rng_tracker_name: str | None; fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool | None
class NormedKeywords(CommonKeywords, total=False):
    normalization: str; zero_centered_gamma: bool; return_layernorm_output: bool; return_layernorm_output_gathered: bool
class AffineKeywords(CommonKeywords, total=False):
    init_method: Fill | None; output_layer_init_method: Fill | None; parallel_mode: str | None
    skip_weight_param_allocation: bool; return_bias: bool; parameters_split: Iterable[str] | Mapping[str, int] | None
class HeadsKeywords(NormedKeywords, total=False):
    bias: bool; set_parallel_mode: bool; fuse_qkv_params: bool; qkv_weight_interleaved: bool
    rotary_pos_interleaved: bool; qk_norm_type: str | None; qk_norm_eps: float; qk_norm_before_rope: bool
    softmax_type: str; window_size: Any; bottom_right_diagonal: bool | None; seq_length: int | None
    micro_batch_size: int | None
class DotProductAttentionKeywords(PlacementKeywords, total=False):
    window_size: Any; bottom_right_diagonal: bool | None; softmax_scale: float | None; softmax_type: str
    softcap: float; layer_number: int | None; attention_type: str; get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None; set_parallel_mode: bool; cp_group: Any; cp_global_ranks: Any; cp_stream: Any
    cp_comm_type: str | None; packing: str; prefix: str
class NormPresetKeywords(PlacementKeywords, total=False):
    hidden_size: int | None; zero_centered_gamma: bool
class LayerNormLinearKeywords(NormedKeywords, AffineKeywords, total=False): ...
class LayerNormMLPKeywords(NormedKeywords, total=False):
    init_method: Fill | None; output_layer_init_method: Fill | None; fc1_bias: bool | None; activation: str
    activation_params: Mapping[str, float] | None; return_bias: bool; set_parallel_mode: bool; checkpoint: bool
    seq_length: int | None; micro_batch_size: int | None
class LinearKeywords(AffineKeywords, total=False): ...
class MultiheadAttentionKeywords(HeadsKeywords, total=False):
    num_gqa_groups: int | None; return_bias: bool; input_layernorm: bool; attention_type: str; qkv_format: str
    prefix: str
class TransformerLayerKeywords(HeadsKeywords, total=False):
    enc_dec_attn_mask_type: str | None; enc_dec_window_size: Any; enc_dec_bottom_right_diagonal: bool | None
    apply_query_key_layer_scaling: bool; attention_softmax_in_fp32: bool
    apply_residual_connection_post_layernorm: bool; output_layernorm: bool; parallel_attention_mlp: bool
    layer_type: str; drop_path_rate: float; activation: str; activation_params: Mapping[str, float] | None
    attn_input_format: str

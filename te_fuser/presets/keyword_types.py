"""Keywords of presets' constructors for type checkers and editors, written by `python -m tests.keyword_types`."""

# fmt: off
# ruff: noqa: E701, E702, I001
from __future__ import annotations
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict
import torch
from typing_extensions import Unpack as Unpack
from te_fuser.presets.keyword_arguments import Fill
class PlacementKeys(TypedDict, total=False):
    params_dtype: torch.dtype | None; device: torch.device | str | None; sequence_parallel: bool | None; tp_group: Any
    tp_size: int; sequence_dim: int; memory: str | int | None; kernels: str | None; fallback: str | None
    verify: bool | None
class ScoreKeys(PlacementKeys, total=False):
    window_size: Any; bottom_right_diagonal: bool | None; softmax_scale: float | None; softmax_type: str; softcap: float
class CommonKeys(PlacementKeys, total=False):
    get_rng_state_tracker: Callable[[], Any] | None; rng_tracker_name: str | None; fuse_wgrad_accumulation: bool
    delay_wgrad_compute: bool | None
class NormedKeys(CommonKeys, total=False):
    normalization: str; zero_centered_gamma: bool; return_layernorm_output: bool; return_layernorm_output_gathered: bool
class AffineKeys(CommonKeys, total=False):
    init_method: Fill | None; output_layer_init_method: Fill | None; parallel_mode: str | None
    skip_weight_param_allocation: bool; return_bias: bool; parameters_split: Iterable[str] | Mapping[str, int] | None
class ProjectionKeys(NormedKeys, total=False):
    bias: bool; set_parallel_mode: bool; fuse_qkv_params: bool; qkv_weight_interleaved: bool
class HeadsKeys(ProjectionKeys, total=False):
    rotary_pos_interleaved: bool; qk_norm_type: str | None; qk_norm_eps: float; qk_norm_before_rope: bool
    softmax_type: str; window_size: Any; bottom_right_diagonal: bool | None; seq_length: int | None
    micro_batch_size: int | None
class BranchKeys(HeadsKeys, total=False):
    enc_dec_attn_mask_type: str | None; enc_dec_window_size: Any; enc_dec_bottom_right_diagonal: bool | None
class DotProductAttentionKeys(ScoreKeys, total=False):
    layer_number: int | None; attention_type: str; get_rng_state_tracker: Callable[[], Any] | None
    rng_tracker_name: str | None; set_parallel_mode: bool; cp_group: Any; cp_global_ranks: Any; cp_stream: Any
    cp_comm_type: str | None; packing: str; prefix: str
class NormPresetKeys(PlacementKeys, total=False):
    hidden_size: int | None; zero_centered_gamma: bool
class LayerNormLinearKeys(NormedKeys, AffineKeys, total=False): ...
class LayerNormMLPKeys(NormedKeys, total=False):
    init_method: Fill | None; output_layer_init_method: Fill | None; fc1_bias: bool | None; activation: str
    activation_params: Mapping[str, float] | None; return_bias: bool; set_parallel_mode: bool; checkpoint: bool
    seq_length: int | None; micro_batch_size: int | None
class LinearKeys(AffineKeys, total=False): ...
class MultiheadAttentionKeys(HeadsKeys, total=False):
    num_gqa_groups: int | None; return_bias: bool; input_layernorm: bool; attention_type: str; qkv_format: str
    prefix: str
class TransformerLayerKeys(BranchKeys, total=False):
    apply_query_key_layer_scaling: bool; attention_softmax_in_fp32: bool
    apply_residual_connection_post_layernorm: bool; output_layernorm: bool; parallel_attention_mlp: bool
    layer_type: str; drop_path_rate: float; activation: str; activation_params: Mapping[str, float] | None
    attn_input_format: str

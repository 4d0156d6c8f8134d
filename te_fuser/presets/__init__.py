"""Transformer Engine's modules as lists of ops, under its names."""

from te_fuser.presets.dot_product_attention import DotProductAttention
from te_fuser.presets.inference_params import InferenceParams
from te_fuser.presets.layer_norm_mlp import LayerNormMLP
from te_fuser.presets.linear import LayerNormLinear, Linear
from te_fuser.presets.multihead_attention import MultiheadAttention
from te_fuser.presets.norm import LayerNorm, RMSNorm
from te_fuser.presets.rotary_position_embedding import RotaryPositionEmbedding, apply_rotary_pos_emb
from te_fuser.presets.transformer_layer import TransformerLayer

__all__ = [
    "DotProductAttention",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "RotaryPositionEmbedding",
    "TransformerLayer",
    "apply_rotary_pos_emb",
]
__dir__ = __all__.copy

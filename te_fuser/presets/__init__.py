"""Transformer Engine's modules as lists of ops, under its names."""

from te_fuser.presets.layer_norm import LayerNorm
from te_fuser.presets.layer_norm_linear import LayerNormLinear
from te_fuser.presets.layer_norm_mlp import LayerNormMLP
from te_fuser.presets.linear import Linear
from te_fuser.presets.rms_norm import RMSNorm

__all__ = ["LayerNorm", "LayerNormLinear", "LayerNormMLP", "Linear", "RMSNorm"]

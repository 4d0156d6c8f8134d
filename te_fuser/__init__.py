"""te_fuser: Transformer models from small fusable operations, run as few, large kernels."""

import importlib
from typing import TYPE_CHECKING, Any

from te_fuser import formula, fusions, ops, quantization, recipe, utils
from te_fuser.capture import GraphedModel, cuda_graph
from te_fuser.checkpointing import CudaRNGStatesTracker, checkpoint
from te_fuser.config import config
from te_fuser.convert import Conversion, convert, revert
from te_fuser.from_torch import from_torch
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fusions import fusion
from te_fuser.ops import FusableOperation
from te_fuser.presets import (
    DotProductAttention,
    InferenceParams,
    LayerNorm,
    LayerNormLinear,
    LayerNormMLP,
    Linear,
    MultiheadAttention,
    RMSNorm,
    RotaryPositionEmbedding,
    TransformerLayer,
    apply_rotary_pos_emb,
)
from te_fuser.quantization import lowering as _lowering  # noqa: F401  regions as what surrounds calls
from te_fuser.quantization import precision, quantized_model_init
from te_fuser.recipe import autocast, fp8_autocast
from te_fuser.sequential import Residual, Sequential
from te_fuser.trace import profile
from te_fuser.variants import Variants
from te_fuser.verify import VerificationError, VerifyReport, verify

if TYPE_CHECKING:
    from te_fuser import parallel
    from te_fuser.parallel import parallelize

fp8_model_init = quantized_model_init

__all__ = [
    "CudaRNGStatesTracker",
    "Conversion",
    "DotProductAttention",
    "FusableOperation",
    "Fuser",
    "GraphedModel",
    "InferenceParams",
    "LayerNorm",
    "LayerNormLinear",
    "LayerNormMLP",
    "Linear",
    "MultiheadAttention",
    "RMSNorm",
    "Residual",
    "RotaryPositionEmbedding",
    "Sequential",
    "TransformerLayer",
    "Variants",
    "VerificationError",
    "VerifyReport",
    "apply_rotary_pos_emb",
    "autocast",
    "checkpoint",
    "config",
    "convert",
    "cuda_graph",
    "formula",
    "fp8_autocast",
    "fp8_model_init",
    "from_torch",
    "fusion",
    "fusions",
    "ops",
    "parallel",
    "parallelize",
    "precision",
    "profile",
    "quantization",
    "quantized_model_init",
    "recipe",
    "revert",
    "utils",
    "verify",
]
__dir__ = __all__.copy  # for completion; the rest can still be had by its name
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in ("common", "pytorch"):  # other names of what is here, as scripts of Transformer Engine have them
        return importlib.import_module(f"te_fuser.{name}")
    if name not in ("parallel", "parallelize"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = importlib.import_module("te_fuser.parallel")  # loads DTensor, which one process does without
    return found if name == "parallel" else found.parallelize

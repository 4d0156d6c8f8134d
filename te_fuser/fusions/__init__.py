"""Fusions: how to declare one, the registry, and the built-in ones (one file each in this folder)."""

from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.pattern import OneOf, Optional, Repeat
from te_fuser.fusions.registry import (
    STRETCH,
    Fusion,
    active,
    disabled,
    enabled,
    fusion,
    get,
    names,
    only,
    register,
    state,
    unregister,
)

# The built-in fusions register themselves.
from te_fuser.fusions import (  # noqa: E402, F401  isort: skip
    bias_gelu_matmul,
    bias_gelu_matmul_quack,
    bias_relu_matmul,
    dot_product_attention,
    gelu_matmul,
    matmul,
    matmul_add,
    matmul_bias,
    matmul_bias_gelu,
    matmul_bias_gelu_quack,
    matmul_bias_relu,
    matmul_main_grad,
    relu_matmul,
    rotary_embedding,
    swiglu_matmul_quack,
)

__all__ = [
    "STRETCH",
    "Cost",
    "Fusion",
    "FusionCall",
    "Match",
    "OneOf",
    "Optional",
    "Repeat",
    "active",
    "disabled",
    "enabled",
    "fusion",
    "get",
    "names",
    "only",
    "register",
    "state",
    "unregister",
]

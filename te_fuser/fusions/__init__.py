"""Fusions: how to declare one, the registry, and the built-in ones (rows of cuBLASLt's, a file for each other)."""

from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Body, Cost, FusionCall, Match
from te_fuser.fusions.pattern import OneOf, Optional, Repeat
from te_fuser.fusions.registry import (
    BY_BLOCKS,
    PEER_COPIES,
    PEER_SUMS,
    RECORDED,
    STRETCH,
    Fusion,
    active,
    disabled,
    enabled,
    get,
    names,
    only,
    register,
    state,
    unregister,
)

# The built-in fusions register themselves. explain() lists what was not taken in this order.
from te_fuser.fusions import (  # noqa: E402, F401  isort: skip
    cublaslt,
    matmul_bias_gelu_quack,
    matmul_main_grad,
    bias_gelu_matmul_quack,
    cublaslt_masks,
    rotary_embedding,
    turned_heads,
    key_value_cache,
    one_query,
    dot_product_attention,
    cublaslt_sums,
    swiglu_matmul_quack,
    cublaslt_float8,
    float8_weights,
    float8_matmul_bias_quack,
    float8_matmul_add_bias_quack,
    float8_matmul_gelu_quack,
    partly_float8_mat_mul,
    cublaslt_own_scales,
    torch_functions,
)

__all__ = [
    "BY_BLOCKS",
    "RECORDED",
    "PEER_COPIES",
    "PEER_SUMS",
    "STRETCH",
    "Body",
    "Cost",
    "Details",
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
__dir__ = __all__.copy

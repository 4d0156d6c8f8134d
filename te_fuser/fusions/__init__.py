"""Fusions: how to declare one, the registry, and the built-in ones."""

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
    arrange,
    disabled,
    enabled,
    get,
    names,
    only,
    register,
    state,
    unregister,
)

# The built-in fusions register themselves. explain() lists what was not taken in the order of `_ORDER`.
from te_fuser.fusions import (  # noqa: F401  isort: skip
    cublaslt,
    cublaslt_float8,
    cublaslt_own_scales,
    dot_product_attention,
    float8_weights,
    mixed_precision_fp8,
    quack,
    rotary,
    torch_functions,
)

_ORDER = """
    matmul matmul_backward matmul_bias matmul_bias_backward matmul_bias_gelu matmul_bias_gelu_aux
    matmul_bias_gelu_quack matmul_bias_gelu_quack_aux matmul_main_grad bias_gelu_matmul_quack
    rotary_embedding_forward rotary_embedding_backward
    turned_heads_forward turned_heads_backward turned_heads_norm_backward turned_heads_bias_norm_backward
    key_value_cache one_query_attention attention_cuda_cudnn attention_cuda_cudnn_frontend attention_cuda_flash
    attention_cuda_flash_attn_4 attention_cuda_efficient attention_cpu_flash gelu_matmul_backward
    gelu_matmul_bias_backward matmul_add matmul_add_dropout matmul_add_bias matmul_add_bias_dropout matmul_bias_relu
    swiglu_matmul_quack quantized_matmul quantized_matmul_bias float8_matmul float8_matmul_bias float8_matmul_backward
    float8_matmul_main_grad float8_matmul_rows_backward float8_matmul_rows_main_grad float8_matmul_bias_quack
    float8_matmul_add_bias_quack float8_matmul_add_bias_quack_dropout float8_matmul_gelu_quack
    float8_matmul_gelu_quack_aux partly_float8_mat_mul partly_float8_mat_mul_backward own_scales_matmul
    own_scales_matmul_bias own_scales_matmul_alone own_scales_matmul_bias_alone
"""
arrange(_ORDER.split())

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

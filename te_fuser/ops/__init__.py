"""Operations: what a model is made of, each by its meaning."""

from te_fuser.distributed.group import Group
from te_fuser.ops.activations import GELU, QGELU, Identity, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, SReLU, Tanh
from te_fuser.ops.attention.dot_product_attention import DotProductAttention
from te_fuser.ops.attention.head_norm import HeadNorm
from te_fuser.ops.attention.head_parallel import OfHeads, OfPositions, SharedAttention
from te_fuser.ops.attention.heads import Apart
from te_fuser.ops.attention.mask import AttentionMask
from te_fuser.ops.attention.math import AttentionScores
from te_fuser.ops.attention.queries_apart import QueriesApart
from te_fuser.ops.base import FusableOperation, NamedInput
from te_fuser.ops.bias_scale import Bias, Scale
from te_fuser.ops.bound import Bound
from te_fuser.ops.casts import Cast, Quantize, QuantizeGradient
from te_fuser.ops.collectives import AllGather, AllReduce, AllReduceGradient, AllToAll, Collective, ReduceScatter
from te_fuser.ops.dropout import Dropout, DropPath
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.glu import GEGLU, GLU, QGEGLU, ClampedSwiGLU, GatedUnit, ReGLU, SReGLU, SwiGLU
from te_fuser.ops.key_value_cache import KeyValueCache
from te_fuser.ops.linear import Linear
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.norms import AdaptiveLayerNorm, L2Norm, LayerNorm, Norm, RMSNorm
from te_fuser.ops.operations import FusedOperation, UnfusedOperation
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.rotary_by_angles import RotaryByAngles
from te_fuser.ops.rotary_embedding import RotaryEmbedding
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.sharing import Cut
from te_fuser.ops.structure import Add, Flatten, Fork, Output, Reshape, Take, Unflatten
from te_fuser.params.binding import Given
from te_fuser.params.concatenated_parameter import Together, Transposed

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AdaptiveLayerNorm",
    "Add",
    "AllGather",
    "AllReduce",
    "AllReduceGradient",
    "AllToAll",
    "Apart",
    "AttentionMask",
    "AttentionScores",
    "Bias",
    "Bound",
    "Cast",
    "ClampedSwiGLU",
    "Collective",
    "Cut",
    "DotProductAttention",
    "DropPath",
    "Dropout",
    "Flatten",
    "Float8MatMul",
    "Fork",
    "FusableOperation",
    "FusedOperation",
    "GatedUnit",
    "Given",
    "Group",
    "HeadNorm",
    "Identity",
    "KeyValueCache",
    "L2Norm",
    "LayerNorm",
    "Linear",
    "LogSoftmax",
    "MatMul",
    "NamedInput",
    "Norm",
    "OfHeads",
    "OfPositions",
    "Output",
    "OwnScalesMatMul",
    "PartlyFloat8MatMul",
    "Quantize",
    "QuantizeGradient",
    "QuantizedMatMul",
    "QueriesApart",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "RotaryByAngles",
    "RotaryEmbedding",
    "RowOp",
    "SReGLU",
    "SReLU",
    "Scale",
    "SharedAttention",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SwiGLU",
    "Take",
    "Tanh",
    "Together",
    "Transposed",
    "Unflatten",
    "UnfusedOperation",
]
__dir__ = __all__.copy

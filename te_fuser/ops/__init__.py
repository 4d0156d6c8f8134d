"""Operations: what a model is made of, each by its meaning."""

from te_fuser.ops.adaptive_layer_norm import AdaptiveLayerNorm
from te_fuser.ops.add import Add
from te_fuser.ops.all_gather import AllGather
from te_fuser.ops.all_reduce import AllReduce
from te_fuser.ops.all_reduce_gradient import AllReduceGradient
from te_fuser.ops.all_to_all import AllToAll
from te_fuser.ops.attention_context import SharedAttention
from te_fuser.ops.attention_heads import Apart
from te_fuser.ops.attention_mask import AttentionMask
from te_fuser.ops.attention_scores import AttentionScores
from te_fuser.ops.base import FusableOperation, NamedInput
from te_fuser.ops.bias import Bias
from te_fuser.ops.bound import Bound
from te_fuser.ops.cast import Cast
from te_fuser.ops.collective import Collective
from te_fuser.ops.cut import Cut
from te_fuser.ops.dot_product_attention import DotProductAttention
from te_fuser.ops.drop_path import DropPath
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.float8_matmul import Float8MatMul, OwnScalesMatMul, PartlyFloat8MatMul
from te_fuser.ops.fork import Fork
from te_fuser.ops.fused_operation import FusedOperation
from te_fuser.ops.gelu import GELU
from te_fuser.ops.given import Given
from te_fuser.ops.glu import GEGLU, GLU, QGEGLU, ClampedSwiGLU, GatedUnit, ReGLU, SReGLU, SwiGLU
from te_fuser.ops.group import Group
from te_fuser.ops.head_norm import HeadNorm
from te_fuser.ops.identity import Identity
from te_fuser.ops.joined import Together
from te_fuser.ops.key_value_cache import KeyValueCache
from te_fuser.ops.l2_norm import L2Norm
from te_fuser.ops.layer_norm import LayerNorm
from te_fuser.ops.linear import Linear
from te_fuser.ops.log_softmax import LogSoftmax
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.norm import Norm
from te_fuser.ops.of_heads import OfHeads, OfPositions
from te_fuser.ops.output import Output
from te_fuser.ops.qgelu import QGELU
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.quantized_matmul import QuantizedMatMul
from te_fuser.ops.queries_apart import QueriesApart
from te_fuser.ops.reduce_scatter import ReduceScatter
from te_fuser.ops.relu import ReLU
from te_fuser.ops.reshape import Flatten, Reshape, Unflatten
from te_fuser.ops.rms_norm import RMSNorm
from te_fuser.ops.rotary_by_angles import RotaryByAngles
from te_fuser.ops.rotary_embedding import RotaryEmbedding
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.scale import Scale
from te_fuser.ops.sigmoid import Sigmoid
from te_fuser.ops.silu import SiLU
from te_fuser.ops.softmax import Softmax
from te_fuser.ops.srelu import SReLU
from te_fuser.ops.take import Take
from te_fuser.ops.tanh import Tanh
from te_fuser.ops.transposed import Transposed
from te_fuser.ops.unfused_operation import UnfusedOperation

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

"""Numbers of 8 bits: tensors with their scale, and what recipes keep of a model's products from call to call."""

from te_fuser.quantization.products import precision
from te_fuser.quantization.rerun import checkpoint_contexts
from te_fuser.quantization.scale_update import TensorState, not_finite, states
from te_fuser.quantization.tensor import QuantizedTensor, quantize
from te_fuser.quantization.weights import quantized_model_init
from te_fuser.recipe.region import microbatch

__all__ = [
    "QuantizedTensor",
    "TensorState",
    "checkpoint_contexts",
    "microbatch",
    "not_finite",
    "precision",
    "quantize",
    "quantized_model_init",
    "states",
]
__dir__ = __all__.copy

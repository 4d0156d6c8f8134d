"""Numbers of 8 bits: tensors with their scale, and what recipes keep from call to call."""

from te_fuser.quantization.folding import fold
from te_fuser.quantization.state import ROLES, amax_of, ensure, scale_of, state_of
from te_fuser.quantization.tensor import QuantizedTensor, quantize

__all__ = ["ROLES", "QuantizedTensor", "amax_of", "ensure", "fold", "quantize", "scale_of", "state_of"]

"""Numbers of 8 bits: tensors with their scale."""

from te_fuser.quantization.tensor import QuantizedTensor, quantize

__all__ = ["QuantizedTensor", "quantize"]

"""Epilogues of products of 8 bits, in the terms of quack-kernels; imported where that is installed."""

from __future__ import annotations

import math
from typing import Any

from quack.activation import sigmoid
from quack.epilogue.frontend import gemm_epilogue
from quack.epilogue.ops import RowVecLoad

from te_fuser.kernels.packages.quack_pieces import LargestMagnitude, as_bfloat16

_SLOPE = 2.0 * math.sqrt(2.0 / math.pi)


def _gelu(h: Any) -> Any:
    return h * sigmoid(_SLOPE * (h + 0.044715 * (h * h * h)))


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def sum_with_bias(acc: Any, a_inverse: Any, b_inverse: Any, bias: Any) -> dict[str, Any]:
    """h = acc * a_inverse * b_inverse + bias; the bias has a number for each column."""
    return {"D": acc * (a_inverse * b_inverse) + bias}


@gemm_epilogue(ops={"bias": RowVecLoad("bias")})
def sum_with_bias_and_addend(acc: Any, c: Any, a_inverse: Any, b_inverse: Any, bias: Any) -> dict[str, Any]:
    """h + c, which has a number for each of the result."""
    return {"D": acc * (a_inverse * b_inverse) + bias + c}


@gemm_epilogue(outputs=("activated",), ops={"bias": RowVecLoad("bias")}, outs={"amax": LargestMagnitude("amax")})
def gelu_in_8_bits(acc: Any, a_inverse: Any, b_inverse: Any, bias: Any, scale: Any) -> dict[str, Any]:
    """(h, gelu(h) * scale, gelu(h) for its amax), of h in bfloat16, in the tanh form."""
    h = as_bfloat16(acc * (a_inverse * b_inverse) + bias)
    y = _gelu(h)
    return {"D": h, "activated": y * scale, "amax": y}


@gemm_epilogue(outputs=("activated",), ops={"bias": RowVecLoad("bias")})
def gelu_in_8_bits_alone(acc: Any, a_inverse: Any, b_inverse: Any, bias: Any, scale: Any) -> dict[str, Any]:
    """gelu(h) * scale alone, of the same."""
    return {"activated": _gelu(as_bfloat16(acc * (a_inverse * b_inverse) + bias)) * scale}

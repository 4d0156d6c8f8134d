"""Float8MatMul + Bias + GELU + Quantize by quack-kernels, where that is installed: 8 bits out of the product."""

from __future__ import annotations

from typing import cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.cublaslt import why_no_backward, why_no_gelu
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.float8_matmul_bias_quack import cost_by_quack, why_no_quack
from te_fuser.fusions.match import Match
from te_fuser.kernels.packages import quack_float8 as products
from te_fuser.ops.activations import GELU
from te_fuser.ops.bias import Bias
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize import Quantize
from te_fuser.ops.quantize_gradient import QuantizeGradient

_NUMBERS = ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse")


def _why_not_gelu(m: Match, bias: int, recorded: bool) -> str | bool:
    quantize = cast(Quantize, m[len(m) - 1])
    if quantize.dtype != torch.float8_e4m3fn:
        return f"it quantizes to float8_e4m3fn, and this is {text_of(quantize.dtype)}"
    if quantize.own is not None:
        return "its scale follows from what it quantizes, which has to be there first"
    if quantize.reads("amax") != recorded or not quantize.reads("scale"):
        return "its scale comes with the call" if quantize.op.scale else "its amax is for plans with a backward alone"
    return why_no_gelu(m, len(m) - 2) or why_no_quack(m, bias) or True


@fusion(
    forward=[Float8MatMul, Bias, GELU, Quantize],
    details=Details(takes=(*_NUMBERS, "1.bias", "3.scale")),
    when=lambda m: why_no_backward(m) or _why_not_gelu(m, 1, recorded=False),
    cost=lambda m: cost_by_quack(m, lambda numbers: -numbers),
)
def float8_matmul_gelu_quack(*tensors: torch.Tensor) -> torch.Tensor:
    """Gives GELU's output in 8 bits alone."""
    return products.linear_bias_gelu(*tensors)


@fusion(
    forward=[Float8MatMul, QuantizeGradient, Bias, GELU, Quantize],
    details=Details(takes=(*_NUMBERS, "2.bias", "4.scale", "4.amax"), gives=("output", "2.output")),
    emits=("2.output",),
    when=lambda m: _why_not_gelu(m, 2, recorded=True),
    cost=lambda m: cost_by_quack(m, lambda numbers: numbers),
)
def float8_matmul_gelu_quack_aux(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the value before GELU too, which backward reads, and raises the amax of its output."""
    return products.linear_bias_gelu_aux(*tensors)

"""Float8MatMul + Bias by quack-kernels, where that is installed: y = x W^T + b."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.cublaslt_float8 import cost_of, why_no_float8
from te_fuser.fusions.declaration import fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS, why_not_here
from te_fuser.fusions.pattern import Optional
from te_fuser.kernels.packages import quack_float8 as products
from te_fuser.ops.bias import Bias
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize_gradient import QuantizeGradient

# Sustained, 8192 rows, cuBLASLt's product with a bias over this one's (an H200, by hand): 1.04 to 1.07 for 4096 to
# 4096, 12288 and 16384 features; 0.97 for 16384 to 4096, for which cuBLASLt's first guess is another one.
_SHARE = 1.06
_MOST_SUMMED = 8192


def why_no_quack(m: Match, bias: int) -> str | None:
    """Why op 0 and a bias behind it are none for quack's kernels; None if they are."""
    why = why_no_float8(m, ("y",))
    if isinstance(why, str):
        return why
    form = cast(Float8MatMul, m[0]).form
    if form.dtype != torch.bfloat16:
        return f"it was written for bfloat16, and this is {text_of(form.dtype)}"
    if set(form.formats[:2]) != {torch.float8_e4m3fn}:
        return f"its factors are in float8_e4m3fn, these in {', '.join(map(text_of, form.formats[:2]))}"
    if not form.fast[0]:
        return "it sums in fewer bits than float32 has, and the recipe says use_split_accumulator for forward"
    if (dtype := m[bias].dtype_of("bias")) != torch.bfloat16:
        return f"the bias is in {text_of(dtype)}, the product in bfloat16"
    return why_not_here(m, products.unusable)


def _why_not_alone(m: Match) -> str | bool:
    summed = cast(Float8MatMul, m[0]).in_features
    slow = f"of {summed} terms cuBLASLt's is faster, it was up to {_MOST_SUMMED}" if summed > _MOST_SUMMED else None
    return slow or why_no_quack(m, len(m) - 1) or True


def cost_by_quack(m: Match, more: Callable[[float], float] = lambda numbers: 0.0) -> Cost:
    """The product's, and what `more` says is written beside its output; at the rate that it has."""
    made = cost_of(m, "y")
    return replace(made, written=made.written + more(made.written / 2), efficiency=_SHARE, calls=CALLS)


@fusion(
    forward=[Float8MatMul, Optional(QuantizeGradient), Bias],
    when=_why_not_alone,
    cost=cost_by_quack,
)
def float8_matmul_bias_quack(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias."""
    op = m[0]
    return products.linear_bias(x, op.weight_data, op.input_inverse, op.weight_inverse, m[len(m) - 1].bias)

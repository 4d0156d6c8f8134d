"""Float8MatMul + Bias + Add by quack-kernels, where that is installed: y = x W^T + b + other, rounded once.

cuBLASLt starts from what is added as well, and has no row: on an H200 that took 18 and 41 us more than its products
with a bias (8192 rows, 4096 and 16384 to 4096 features), as much as is saved behind them. Here one group of warps loads
it while the other one multiplies.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import cast

import torch

from te_fuser.fusions.cublaslt import why_no_addend, why_no_dropout
from te_fuser.fusions.cublaslt_float8 import cost_of
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.float8_matmul_bias_quack import why_no_quack
from te_fuser.fusions.match import Cost, Match
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS
from te_fuser.fusions.pattern import Optional
from te_fuser.kernels.packages import quack_float8 as products
from te_fuser.ops.bias import Bias
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.float8_matmul import Float8MatMul
from te_fuser.ops.quantize_gradient import QuantizeGradient
from te_fuser.ops.structure import Add

# Sustained, in turns, cuBLASLt's product with a bias over this one (an H200, by hand): 0.96 for 4096 to 4096 features,
# 1.01 for 16384 to 4096; of that 8 and 4 us are for what is added.
_SHARE = 0.98
_NUMBERS = ("input", "0.weight_data", "0.input_inverse", "0.weight_inverse")


def _why_not(m: Match, dropout: bool) -> str | bool:
    why = why_no_dropout(m, len(m) - 2) if dropout else None
    why = why or why_no_addend(m, len(m) - 1, cast(Float8MatMul, m[0]).form.dtype)
    return why or why_no_quack(m, len(m) - 2 - dropout) or True


def _cost(m: Match) -> Cost:
    made = cost_of(m, "y")
    return replace(made, read=made.read + made.written, efficiency=_SHARE, calls=CALLS)


@fusion(
    forward=[Float8MatMul, Optional(QuantizeGradient), Bias, Add],
    details=Details(takes=(*_NUMBERS, "-2.bias", "-1.other")),
    when=functools.partial(_why_not, dropout=False),
    cost=_cost,
)
def float8_matmul_add_bias_quack(*tensors: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias and what a residual adds."""
    return products.linear_bias_add(*tensors)


@fusion(
    forward=[Float8MatMul, Optional(QuantizeGradient), Bias, Dropout, Add],
    details=Details(takes=(*_NUMBERS, "-3.bias", "-1.other")),
    when=functools.partial(_why_not, dropout=True),
    cost=_cost,
)
def float8_matmul_add_bias_quack_dropout(*tensors: torch.Tensor) -> torch.Tensor:
    """The same, where Dropout drops nothing."""
    return products.linear_bias_add(*tensors)

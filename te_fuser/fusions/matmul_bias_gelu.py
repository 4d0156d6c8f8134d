"""MatMul + Bias + GELU by cuBLASLt: y = gelu(x W^T + b), in the tanh form."""

from __future__ import annotations

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.matmul import cost_of, native, why_no_backward, why_no_product
from te_fuser.fusions.matmul_bias import why_no_bias
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.bias import Bias
from te_fuser.ops.gelu import GELU
from te_fuser.ops.matmul import MatMul


def why_no_gelu(m: Match, at: int, features: int) -> str | None:
    """Why the epilogues' GELU is not that of op `at`, which has so many features; None if it is."""
    if m[at].op.approximate != "tanh":
        return "the epilogue's GELU is the tanh form, and this one is exact (erf)"
    if m.dtype == torch.float32:
        return "the epilogue's tanh errs by 1e-5, too much for float32"
    if features % products.GELU_MULTIPLE:
        return f"the value before GELU is read and written in rows of a multiple of 8, and this one has {features}"
    return None


def _why_not(m: Match, kind: str) -> bool | str:
    return why_no_gelu(m, 2, m.y.features) or why_no_bias(m) or why_no_product(m, kind) or True


@fusion(
    forward=[MatMul, Bias, GELU],
    takes=("input", "0.weight", "1.bias"),
    when=lambda m: why_no_backward(m) or _why_not(m, "forward_bias_gelu"),
    cost=lambda m: cost_of(m, "forward_bias_gelu"),
    choose=lambda m, method: native(m, "forward_bias_gelu"),
)
def matmul_bias_gelu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gives the output alone."""
    return products.linear_bias_gelu(x, weight, bias)


@fusion(
    forward=[MatMul, Bias, GELU],
    takes=("input", "0.weight", "1.bias"),
    gives=("output", "1.output"),
    emits=("1.output",),
    when=lambda m: _why_not(m, "forward_bias_gelu_aux"),
    cost=lambda m: cost_of(m, "forward_bias_gelu_aux"),
    choose=lambda m, method: native(m, "forward_bias_gelu_aux"),
)
def matmul_bias_gelu_aux(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the value before GELU too, which backward reads."""
    return products.linear_bias_gelu_aux(x, weight, bias)

"""MatMul + Bias + ReLU by cuBLASLt: y = max(x W^T + b, 0)."""

from __future__ import annotations

import torch

from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.matmul_bias import why_no_bias
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.relu import ReLU


@fusion(
    forward=[MatMul, Bias, ReLU],
    takes=("input", "0.weight", "1.bias"),
    when=lambda m: why_no_bias(m) or why_no_product(m, "forward_bias_relu") or True,
    cost=lambda m: cost_of(m, "forward_bias_relu"),
    choose=lambda m, method: native(m, "forward_bias_relu"),
)
def matmul_bias_relu(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gives the output alone; backward knows from it where ReLU passed what it read."""
    return products.linear_bias_relu(x, weight, bias)

"""MatMul + Bias as one library call whose epilogue adds the bias: y = x W^T + b."""

from __future__ import annotations

import torch

from te_fuser.fusions.registry import fusion
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul, as_rows, in_shape_of
from te_fuser.ops.products import linear


@fusion(
    forward=[MatMul, Bias],
    when=lambda m: m[0].weight.dtype == m[1].bias.dtype or "weight and bias differ in dtype",
    takes=("input", "0.weight", "1.bias"),
)
def matmul_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias; gives its output, not the product before the bias."""
    # Under autocast the weight comes cast; the epilogue takes a bias of its dtype.
    return in_shape_of(x, linear(as_rows(x), weight, bias if bias.dtype == x.dtype else bias.to(x.dtype)))

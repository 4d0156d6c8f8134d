"""Backward of Bias + GELU + MatMul by quack-kernels, where that is installed: three results of one product.

dh = (dy W) * gelu'(h), the bias's gradient and gelu(h) come from one kernel; dW = dy^T gelu(h) follows at once, so that
nothing but h is kept for it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_fuser.fusions.cublaslt import cost_of, why_no_product
from te_fuser.fusions.declaration import fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.matmul_bias_gelu_quack import cost_of_product, why_no_quack
from te_fuser.fusions.matmul_main_grad import put_weight_gradient
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import quack_matmul
from te_fuser.ops.activations import GELU
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul

# As the forward's: 10.008 ms with it, 10.032 without, and the pass over dh for the sum is spared.
_SHARE = 1.01


def weight_kind(m: Match, at: int) -> str:
    """The product of cuBLASLt's that gives the gradient of the weight of op `at`."""
    return "wgrad_onto" if m[at].accumulate_into_main_grad else "wgrad"


def why_not_onto(m: Match, at: int) -> str | None:
    """Why the gradient of the weight of op `at` cannot go to its main_grad in the same step; None where it may."""
    if m[at].accumulate_into_main_grad and m[at].own_dtype_of("weight") != m[at].dtype_of("weight"):
        return "it reads the weight as it is cast, and main_grad is that of the weight itself"
    return None


def cost_with_weight_gradient(m: Match, kind: str, share: float, at: int, *, read: float = 0, written: float) -> Cost:
    """What dy W takes, and then the gradient of the weight of op `at`, where it is needed.

    Args:
        kind, share: of dy W, as in `cost_of_product`.
        read, written: bytes beside those of a product of that kind.
    """
    product = cost_of_product(m, kind, share, at) + Cost(read, written, launches=0, efficiency=share)
    if not m[at].weight.requires_grad:
        return product
    weight = cost_of(m, weight_kind(m, at), at)
    # Products of as many operations each: their rate together, where a sum of costs has the lesser one.
    return replace(product + weight, efficiency=2 / (1 / product.efficiency + 1 / weight.efficiency))


def weight_gradient(m: FusionCall, at: int, dy: torch.Tensor, x: torch.Tensor) -> dict[str, torch.Tensor]:
    """dy^T x for the weight of op `at`, by its name among the gradients, or put into its main_grad; if it is needed."""
    name = f"{at}.weight"
    if not m.needs(name):
        return {}
    op = m[at]
    if op.accumulate_into_main_grad:
        return {name: put_weight_gradient(dy, x, m[name], op.overwrite_main_grad)}
    return {name: products.multiply("wgrad", dy, x)}


@fusion(
    backward=[Bias, GELU, MatMul],
    reads=("0.output", "2.weight"),
    when=lambda m: why_no_quack(m, 2, 1, 0) or why_not_onto(m, 2) or why_no_product(m, weight_kind(m, 2), at=2) or True,
    cost=lambda m: cost_with_weight_gradient(m, "dgrad_dgelu", _SHARE, 2, written=m.x.nbytes),  # gelu(h), made again
)
def bias_gelu_matmul_quack(m: FusionCall, dy: torch.Tensor) -> Any:
    """The gradients of what enters the bias, of the bias, and of the weight."""
    dh, y, total = quack_matmul.input_gradient_dgelu_sum(dy, m["2.weight"], m["0.output"])
    made = {"0.bias": total.to(dh.dtype)} if m.needs("0.bias") else {}
    return dh, made | weight_gradient(m, 2, dy, y)

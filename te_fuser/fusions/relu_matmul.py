"""MatMul + Bias + ReLU, then MatMul, with a mask between forward and backward: dh = dy W where h > 0, in one product.

cuBLASLt's forward product writes a bit for each element, whether h = x W^T + b is positive, and the product that
brings the gradient back reads it. The mask is no value of the list, so both are one joint fusion.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch

from te_fuser.fusions.match import Cost, Match
from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.matmul_bias import why_no_bias
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.relu import ReLU

PATTERN = (MatMul, Bias, ReLU, MatMul)
FORWARD_OPS = slice(3)  # the second product runs forward as it is planned: its bias or a residual sum may go with it


def why_not(m: Match, dgrad: str) -> bool | str:
    """Why a match cannot run by a mask, its gradient by the product `dgrad`; True if it can."""
    if not m.needs_grad:
        return "there is no backward to read the mask"
    why = why_no_bias(m) or why_no_product(m, "forward_bias_relu_mask")
    return why or why_no_product(m, dgrad, at=3) or why_no_product(m, "wgrad", at=3) or True


def costs(m: Match, dgrad: str) -> tuple[Cost, tuple[Cost, Cost]]:
    """Forward's, and backward's for each of its nodes."""
    return cost_of(m, "forward_bias_relu_mask"), (cost_of(m, dgrad, at=3), cost_of(m, "wgrad", at=3))


def chosen(m: Match, method: str, dgrad: str) -> Callable[..., Any]:
    """The native product for a method."""
    return native(m, {"forward": "forward_bias_relu_mask", "weight_gradient": "wgrad"}.get(method, dgrad))


def mask_size(m: Match) -> Mapping[str, int]:
    """The bytes of what is saved."""
    return {"mask": m.x.rows * products.mask_bytes(cast(MatMul, m[0].op).out_features)}


@fusion(
    joint=PATTERN,
    forward_ops=FORWARD_OPS,
    backward_ops=2,
    takes=("input", "0.weight", "1.bias"),
    saves=("mask",),
    saved_bytes=mask_size,
    gradients=(
        Gradient(("input",), ("1.weight", "mask"), "input_gradient"),
        Gradient(("1.weight",), ("0.output",), "weight_gradient"),
    ),
    when=lambda m: why_not(m, "dgrad_drelu"),
    cost=lambda m: costs(m, "dgrad_drelu"),
    choose=lambda m, method: chosen(m, method, "dgrad_drelu"),
)
class relu_matmul_by_mask:
    """ReLU's slope in the epilogue of dy W; dW = dy^T relu(h) reads ReLU's output, which is kept for it."""

    weight_gradient = staticmethod(products.weight_gradient)

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(max(h, 0), where h > 0) for h = x W^T + b."""
        return products.linear_bias_relu_mask(x, weight, bias)

    @staticmethod
    def input_gradient(dy: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """dh = dy W where h > 0."""
        return products.input_gradient_drelu(dy, weight, mask)

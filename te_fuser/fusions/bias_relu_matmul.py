"""MatMul + Bias + ReLU, then MatMul, by a mask: dh = dy W where h > 0 and its sum over the rows, in one product.

As relu_matmul, with the bias's gradient from the same product.
"""

from __future__ import annotations

import torch

from te_fuser.fusions.registry import fusion
from te_fuser.fusions.relu_matmul import FORWARD_OPS, PATTERN, chosen, costs, mask_size, why_not
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient


@fusion(
    joint=PATTERN,
    forward_ops=FORWARD_OPS,
    backward_ops=3,
    takes=("input", "0.weight", "1.bias"),
    saves=("mask",),
    saved_bytes=mask_size,
    gradients=(
        Gradient(("input", "0.bias"), ("2.weight", "mask"), "input_and_bias_gradient"),
        Gradient(("2.weight",), ("1.output",), "weight_gradient"),
    ),
    when=lambda m: why_not(m, "dgrad_drelu_sum"),
    cost=lambda m: costs(m, "dgrad_drelu_sum"),
    choose=lambda m, method: chosen(m, method, "dgrad_drelu_sum"),
)
class bias_relu_matmul_by_mask:
    """ReLU's slope and the bias's gradient in the epilogue of dy W; dW = dy^T relu(h) reads ReLU's output."""

    weight_gradient = staticmethod(products.weight_gradient)

    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(max(h, 0), where h > 0) for h = x W^T + b."""
        return products.linear_bias_relu_mask(x, weight, bias)

    @staticmethod
    def input_and_bias_gradient(
        dy: torch.Tensor, weight: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(dh, the sum of dh over its rows)."""
        return products.input_gradient_drelu_sum(dy, weight, mask)

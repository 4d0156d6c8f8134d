"""Backward of GELU + MatMul by cuBLASLt: dh = (dy W) * gelu'(h) in one product, h the value before GELU."""

from __future__ import annotations

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.matmul_bias_gelu import why_no_gelu
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient
from te_fuser.ops.gelu import GELU
from te_fuser.ops.matmul import MatMul


def _why_not(m: Match) -> bool | str:
    why = why_no_gelu(m, 0, m.x.features)
    return why or why_no_product(m, "dgrad_dgelu", at=1) or why_no_product(m, "wgrad", at=1) or True


@fusion(
    backward=[GELU, MatMul],
    gradients=(
        Gradient(("input",), ("1.weight", "input"), "input_gradient"),
        Gradient(("1.weight",), ("0.output",), "weight_gradient"),
    ),
    when=_why_not,
    cost=lambda m: (cost_of(m, "dgrad_dgelu", at=1), cost_of(m, "wgrad", at=1)),
    choose=lambda m, method: native(m, {"input_gradient": "dgrad_dgelu", "weight_gradient": "wgrad"}[method]),
)
class gelu_matmul_backward:
    """The slope of GELU in the epilogue of dy W; dW = dy^T gelu(h) reads GELU's output, which is kept for it."""

    @staticmethod
    def input_gradient(dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        """dh = (dy W) * gelu'(h)."""
        return products.input_gradient_dgelu(dy, weight, before)

    weight_gradient = staticmethod(products.weight_gradient)

"""Backward of Bias + GELU + MatMul by cuBLASLt: dh = (dy W) * gelu'(h) and its sum over the rows, in one product."""

from __future__ import annotations

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.matmul_bias import why_no_bias
from te_fuser.fusions.matmul_bias_gelu import why_no_gelu
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.gelu import GELU
from te_fuser.ops.matmul import MatMul

_KINDS = {"input_and_bias_gradient": "dgrad_dgelu_sum", "weight_gradient": "wgrad"}


def _why_not(m: Match) -> bool | str:
    why = why_no_gelu(m, 1, m.x.features) or why_no_bias(m, 0)
    return why or why_no_product(m, "dgrad_dgelu_sum", at=2) or why_no_product(m, "wgrad", at=2) or True


@fusion(
    backward=[Bias, GELU, MatMul],
    gradients=(
        Gradient(("input", "0.bias"), ("2.weight", "0.output"), "input_and_bias_gradient"),
        Gradient(("2.weight",), ("1.output",), "weight_gradient"),
    ),
    when=_why_not,
    cost=lambda m: (cost_of(m, "dgrad_dgelu_sum", at=2), cost_of(m, "wgrad", at=2)),
    choose=lambda m, method: native(m, _KINDS[method]),
)
class bias_gelu_matmul_backward:
    """The slope of GELU and the bias's gradient in the epilogue of dy W; dW = dy^T gelu(h) reads GELU's output."""

    @staticmethod
    def input_and_bias_gradient(
        dy: torch.Tensor, weight: torch.Tensor, before: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(dh, the sum of dh over its rows)."""
        return products.input_gradient_dgelu_sum(dy, weight, before)

    weight_gradient = staticmethod(products.weight_gradient)

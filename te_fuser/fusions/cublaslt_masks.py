"""Rows of cuBLASLt's with a mask between forward and backward: MatMul + Bias + ReLU, then MatMul.

The forward product writes a bit for each element, whether h = x W^T + b is positive, and the product that brings the
gradient back, dh = dy W where h > 0, reads it. The mask is no value of the list, so both are one joint fusion. The
second product runs forward as it is planned: its bias or a residual sum may go with it.
"""

from __future__ import annotations

from te_fuser.fusions.cublaslt import ProductRow, declare
from te_fuser.ops.activations import ReLU
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul


def _row(name: str, doc: str, backward_ops: int, *backward: Gradient) -> ProductRow:
    return ProductRow(
        name,
        doc,
        (MatMul, Bias, ReLU, MatMul),
        forward="forward_bias_relu_mask",
        backward=backward,
        saves=("mask",),
        forward_ops=3,
        backward_ops=backward_ops,
        when=lambda m: None if m.needs_grad else "there is no backward to read the mask",
    )


_ROWS = (
    _row(
        "relu_matmul_by_mask",
        "ReLU's slope in the epilogue of dy W; dW = dy^T relu(h) reads ReLU's output, which is kept for it.",
        2,
        Gradient(("input",), ("1.weight", "mask"), "dgrad_drelu"),
        Gradient(("1.weight",), ("0.output",), "wgrad"),
    ),
    _row(
        "bias_relu_matmul_by_mask",
        "ReLU's slope and the bias's gradient in the epilogue of dy W; dW = dy^T relu(h) reads ReLU's output.",
        3,
        Gradient(("input", "0.bias"), ("2.weight", "mask"), "dgrad_drelu_sum"),
        Gradient(("2.weight",), ("1.output",), "wgrad"),
    ),
)
FUSIONS = tuple(map(declare, _ROWS))

"""More rows of cuBLASLt's: GELU's slope in the product that reads it, a residual sum as the addend, ReLU at the end.

A product with an addend starts from it (beta = 1) and writes a tensor of its own, so it does not matter who else reads
what is added.
"""

from __future__ import annotations

from te_fuser.fusions.cublaslt import ProductRow, declare
from te_fuser.ops.activations import GELU, ReLU
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.dropout import Dropout
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.structure import Add

_ROWS = (
    ProductRow(
        "gelu_matmul_backward",
        "The slope of GELU in the epilogue of dy W; dW = dy^T gelu(h) reads GELU's output, which is kept for it.",
        (GELU, MatMul),
        backward=(
            Gradient(("input",), ("1.weight", "input"), "dgrad_dgelu"),
            Gradient(("1.weight",), ("0.output",), "wgrad"),
        ),
    ),
    ProductRow(
        "gelu_matmul_bias_backward",
        "The same, and dW with an epilogue that sums dy over its rows for the bias behind the product.",
        (GELU, MatMul, Bias),
        backward=(
            Gradient(("input",), ("1.weight", "input"), "dgrad_dgelu"),
            Gradient(("1.weight", "2.bias"), ("0.output",), "wgrad_sum"),
        ),
    ),
    ProductRow("matmul_add", "y = x W^T + other.", (MatMul, Add), forward="forward_add"),
    ProductRow(
        "matmul_add_dropout",
        "y = x W^T + other, where Dropout drops nothing.",
        (MatMul, Dropout, Add),
        forward="forward_add",
    ),
    ProductRow("matmul_add_bias", "y = x W^T + b + other.", (MatMul, Bias, Add), forward="forward_bias_add"),
    ProductRow(
        "matmul_add_bias_dropout",
        "y = x W^T + b + other, where Dropout drops nothing.",
        (MatMul, Bias, Dropout, Add),
        forward="forward_bias_add",
    ),
    ProductRow(
        "matmul_bias_relu",
        "Gives the output alone; backward knows from it where ReLU passed what it read.",
        (MatMul, Bias, ReLU),
        forward="forward_bias_relu",
    ),
)
FUSIONS = tuple(map(declare, _ROWS))

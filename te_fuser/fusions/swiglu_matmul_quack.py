"""Backward of SwiGLU + MatMul by quack-kernels, where that is installed: three results of one product.

With da = dy W and h = [gate, up]: both halves of dh, which are da * up * silu'(gate) and da * silu(gate), and
a = silu(gate) * up come from one kernel; dW = dy^T a follows at once, so that nothing but h is kept for it.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from te_fuser.fusions.bias_gelu_matmul_quack import (
    cost_with_weight_gradient,
    weight_gradient,
    weight_kind,
    why_not_onto,
)
from te_fuser.fusions.cublaslt import why_no_product
from te_fuser.fusions.declaration import fusion
from te_fuser.fusions.match import FusionCall, Match
from te_fuser.fusions.matmul_bias_gelu_quack import why_no_quack_product, why_not_here
from te_fuser.kernels.packages import quack_matmul
from te_fuser.ops.glu import SwiGLU
from te_fuser.ops.matmul import MatMul

# Alone, 8192 rows, 4096 to 14336 features, bfloat16, on an H200: 1.43 ms, torch.mm 1.50. The MLP, forward and backward:
# 13.16 ms with it, 13.31 with cuBLASLt's product and SwiGLU's own kernel, 13.25 as the package's own MLP.
_SHARE = 1.03


def _why_not(m: Match) -> bool | str:
    why = why_no_quack_product(m, 1, "it is for bfloat16 alone")
    if not why and not cast(SwiGLU, m[0]).gate_first:
        why = "its gate is the first half of SwiGLU's input, and here it is the second (gate_first=False)"
    why = why or why_not_here(m, quack_matmul.unusable_by_gates) or why_not_onto(m, 1)
    return why or why_no_product(m, weight_kind(m, 1), at=1) or True


@fusion(
    backward=[SwiGLU, MatMul],
    reads=("input", "1.weight"),
    when=_why_not,
    # dy W reads both halves of SwiGLU's input, and writes two results of its size beside the plain product's one.
    cost=lambda m: cost_with_weight_gradient(m, "dgrad", _SHARE, 1, read=m.x.nbytes, written=m.x.nbytes),
)
def swiglu_matmul_quack(m: FusionCall, dy: torch.Tensor) -> Any:
    """The gradients of SwiGLU's input, and of the weight."""
    dh, y = quack_matmul.input_gradient_dswiglu(dy, m["1.weight"], m["input"])
    return dh, weight_gradient(m, 1, dy, y)

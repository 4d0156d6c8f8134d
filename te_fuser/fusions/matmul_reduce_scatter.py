"""MatMul + ReduceScatter as one step, as ranks run a product that they share by row and by sequence.

In forward rows are sent while others are computed. In backward dy is gathered while the rows that are there are
multiplied, and what is gathered is given too, for the weight's gradient.
"""

from __future__ import annotations

import torch

from te_fuser.fusions.declaration import fusion
from te_fuser.fusions.match import FusionCall
from te_fuser.fusions.pipeline import Backward, cost_of_gathering, cost_of_scattering, why_no_pipeline
from te_fuser.kernels import symmetric
from te_fuser.ops.base import Gradient
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.reduce_scatter import ReduceScatter


@fusion(
    forward=[MatMul, ReduceScatter],
    when=lambda m: why_no_pipeline(m) or True,
    cost=lambda m: cost_of_scattering(m, "forward", m.y.features),
)
def matmul_reduce_scatter(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """y = this rank's rows of the sum of all ranks' x W^T."""
    return symmetric.matmul_reduce_scatter(x, m[0].weight.t(), m[1].group)


_BACKWARD = Backward(
    (MatMul, ReduceScatter),
    (
        Gradient(("input", "0.d_output"), ("0.weight",), "input_gradient"),
        Gradient(("0.weight",), ("0.d_output", "input"), "weight_gradient"),
    ),
    symmetric.all_gather_matmul,
    lambda m: cost_of_gathering(m, "dgrad", m.y.features),
)


@_BACKWARD.declared()
class matmul_reduce_scatter_backward:
    """dx = [dy of rank 0; dy of rank 1; ..] W; dW = dy^T x of the gathered dy."""


@_BACKWARD.declared(onto=True)
class matmul_reduce_scatter_backward_main_grad:
    """The same, and dW goes to main_grad."""

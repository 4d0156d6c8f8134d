"""AllGather + MatMul as one step, as ranks run a product that they share by column and by sequence.

In forward the rows of this rank are multiplied while others come. What is gathered is given too, for the weight's
gradient. In backward dx is scattered while it is computed.
"""

from __future__ import annotations

import torch

from te_fuser.fusions.declaration import fusion
from te_fuser.fusions.match import FusionCall
from te_fuser.fusions.pipeline import Backward, cost_of_gathering, cost_of_scattering, why_no_pipeline
from te_fuser.kernels import symmetric
from te_fuser.ops.all_gather import AllGather
from te_fuser.ops.base import Gradient
from te_fuser.ops.matmul import MatMul


@fusion(
    forward=[AllGather, MatMul],
    emits=("0.output",),
    when=lambda m: why_no_pipeline(m) or True,
    cost=lambda m: cost_of_gathering(m, "forward", m.x.features),
)
def all_gather_matmul(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """y = [x of rank 0; x of rank 1; ..] W^T; gives what is gathered, too."""
    y, gathered = symmetric.all_gather_matmul(x, m[1].weight.t(), m[0].group)
    m.emit("0.output", gathered)
    return y


_BACKWARD = Backward(
    (AllGather, MatMul),
    (Gradient(("input",), ("1.weight",), "input_gradient"), Gradient(("1.weight",), ("0.output",), "weight_gradient")),
    symmetric.matmul_reduce_scatter,
    lambda m: cost_of_scattering(m, "dgrad", m.x.features),
)


@_BACKWARD.declared()
class all_gather_matmul_backward:
    """dx = this rank's rows of the sum of all ranks' dy W; dW = dy^T x of the gathered x."""


@_BACKWARD.declared(onto=True)
class all_gather_matmul_backward_main_grad:
    """The same, and dW goes to main_grad."""

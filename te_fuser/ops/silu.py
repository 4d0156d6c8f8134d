"""SiLU: the input gated by its own sigmoid."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from te_fuser.formula import sigmoid
from te_fuser.ops.base import Spec
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import TorchFunction


class SiLU(RowOp):
    """The input gated by its own sigmoid (swish): y = x * sigmoid(x), pointwise.

    Source: Elfwing et al., "Sigmoid-weighted linear units for neural network function approximation" (2017).
    """

    role = "silu"

    def compute(self, x: Any) -> Any:
        return x * sigmoid(x)

    def by_torch(self, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
        return TorchFunction("F.silu", functional.silu, keeps={"input": ("input",)})

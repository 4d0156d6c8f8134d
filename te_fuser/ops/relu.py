"""ReLU: what is negative becomes zero."""

from __future__ import annotations

from typing import Any

from torch.nn import functional

from te_fuser.formula import relu
from te_fuser.ops.base import Spec
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import TorchFunction


class ReLU(RowOp):
    """Zero what is negative: y = max(x, 0), pointwise; the gradient at 0 is 0.

    Source: Nair and Hinton, "Rectified linear units improve restricted Boltzmann machines" (2010).
    """

    role = "relu"

    def compute(self, x: Any) -> Any:
        return relu(x)

    def by_torch(self, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
        return TorchFunction("F.relu", functional.relu, keeps={"input": ("output",)})

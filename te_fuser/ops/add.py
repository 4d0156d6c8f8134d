"""Add: a named value added to the main one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_fuser.ops.base import NamedInput, Spec
from te_fuser.ops.checks import check_name
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import TorchFunction


class Add(RowOp):
    """Add what a `Fork` before it, or the call, names: y = x + name, both of one shape, in the wider of their dtypes.

    Raises:
        ValueError: for a name that cannot be a keyword argument.

    Source: He et al., "Deep residual learning for image recognition" (2015).
    """

    promotes = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"other": NamedInput(self.name)}

    def compute(self, x: Any, other: Any) -> Any:
        return x + other

    def by_torch(self, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
        return TorchFunction("torch.add", torch.add, ("input", "other"))

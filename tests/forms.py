"""Ops that give a value in two forms, and a gradient in a dtype of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.formula import tanh
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.operations import UnfusedOperation


@op_table.exports.row(True)
class TwoForms(ops.RowOp):
    """y = tanh(x) in bfloat16 for the next op, and in float32 under another name."""

    def named_outputs(self) -> tuple[str, ...]:
        return ("wide",)

    def named_output(self, name: str, out: Spec) -> Spec:
        return replace(out, dtype=torch.float32)

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16

    def compute(self, x: Any) -> Any:
        return tanh(x)


def halved(op: Any, dtype: torch.dtype) -> torch.dtype:
    """float16 for bfloat16."""
    return torch.float16 if dtype == torch.bfloat16 else dtype


@op_table.gradient_dtype.row(halved)
class HalfProduct(UnfusedOperation):
    """y = x W^T, whose gradient of x is in float16 where the rest is in bfloat16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(width, width) * width**-0.5)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return Gradient(("input",), ("weight",), "dx"), Gradient(("weight",), ("input",), "dw")

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x @ call["weight"].mT

    def dx(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"input": (dy.float() @ call["weight"].float()).to(halved(self, dy.dtype))}

    def dw(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        return {"weight": dy.flatten(0, -2).mT @ call["input"].flatten(0, -2)}

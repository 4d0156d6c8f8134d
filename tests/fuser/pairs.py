"""Ops of two values that tests of the fuser share."""

from __future__ import annotations

import functools
from typing import Any

import torch

from te_fuser.ops import op_table
from te_fuser.ops.base import OpCall
from te_fuser.ops.operations import UnfusedOperation

WIDTH = 24


class Pair(UnfusedOperation):
    """y = 2 x, and 3 x as a value of its own."""

    values = ("other",)
    reads = ()
    seen: tuple[bool, bool] = (False, False)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return {"output": 2 * x, "other": 3 * x}

    def op_backward(self, call: OpCall, dy: torch.Tensor | None) -> torch.Tensor:
        other = call.get("d_other")
        type(self).seen = dy is not None, other is not None
        parts = [k * g for k, g in ((2, dy), (3, other)) if g is not None]
        return functools.reduce(torch.add, parts)


@op_table.exports.row(True)
class Exported(Pair):
    """Pair whose other value is the caller's."""

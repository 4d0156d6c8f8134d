"""Policies of torch.autocast by class of op: the dtype that an op runs in, and parameters that stay in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser import ops
from te_fuser.ops.float8_matmul import NUMBERS
from te_fuser.ops.op_table import Kind, OpTable


@dataclass(frozen=True)
class AutocastPolicy:
    """Dtypes of an op and of its parameters.

    Attributes:
        runs_in: under torch.autocast "lower" casts x and parameters down; "float32" casts x up, on GPUs; "follow" takes
            x as it comes, and where that is in the lower dtype, as after a product, fusions read float32 parameters in
            it too; formulas need not. None leaves the op alone.
        wide_parameters: those that an opaque op takes in float32 whatever its input is.
    """

    runs_in: str | None = None
    wide_parameters: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.runs_in not in ("lower", "float32", "follow", None):
            raise ValueError(f"autocast_policy takes 'lower', 'float32', 'follow' or None, got {self.runs_in!r}")


AUTOCAST = OpTable("autocast", default=AutocastPolicy())
AUTOCAST.add(AutocastPolicy("lower"), ops.MatMul)
AUTOCAST.add(AutocastPolicy("follow"), ops.Bias, ops.HeadNorm)
AUTOCAST.add(AutocastPolicy("float32"), ops.Norm, ops.L2Norm, ops.AdaptiveLayerNorm, ops.Softmax, ops.LogSoftmax)
AUTOCAST.add(AutocastPolicy(wide_parameters=("sink",)), ops.DotProductAttention)
_amaxes = ("input_amax", "weight_amax", "output_gradient_amax")
AUTOCAST.add(AutocastPolicy(wide_parameters=("weight", *NUMBERS, *_amaxes)), ops.PartlyFloat8MatMul)


def autocast_policy(runs_in: str | None = None, *, wide_parameters: tuple[str, ...] = ()) -> Callable[[Kind], Kind]:
    """Decorator that gives a class of ops, and those derived from it, an `AutocastPolicy`."""
    return AUTOCAST.row(AutocastPolicy(runs_in, wide_parameters))


def cast_to(dtype: torch.dtype) -> ops.FusableOperation:
    """The op that stands before one that runs in another dtype."""
    return ops.Cast(dtype)

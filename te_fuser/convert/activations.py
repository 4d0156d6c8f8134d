"""The activations of transformers' MLPs as ops, alone and as gates; imported where transformers is, by its families."""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn
from transformers import activations as theirs

from te_fuser import ops
from te_fuser.ops.base import FusableOperation

Maker = Callable[[], FusableOperation]
_EXACT: tuple[Maker, Maker] = functools.partial(ops.GELU, "none"), functools.partial(ops.GEGLU, approximate="none")
# Class of an activation -> the op, and the op that gates by it.
_OPS: dict[type[nn.Module], tuple[Maker, Maker]] = {
    nn.SiLU: (ops.SiLU, ops.SwiGLU),
    theirs.SiLUActivation: (ops.SiLU, ops.SwiGLU),
    theirs.GELUActivation: _EXACT,
    theirs.GELUTanh: (ops.GELU, ops.GEGLU),
    theirs.NewGELUActivation: (ops.GELU, ops.GEGLU),
    theirs.FastGELUActivation: (ops.GELU, ops.GEGLU),
    theirs.QuickGELUActivation: (ops.QGELU, ops.QGEGLU),
    nn.ReLU: (ops.ReLU, ops.ReGLU),
    theirs.ReLUSquaredActivation: (ops.SReLU, ops.SReGLU),
    nn.Sigmoid: (ops.Sigmoid, ops.GLU),
}


def activation_for(module: nn.Module) -> FusableOperation | None:
    """The op that computes what an activation does; None where there is none."""
    found = _OPS.get(type(module))
    return None if found is None else found[0]()


def gate_for(module: nn.Module) -> FusableOperation | None:
    """The op that gates by an activation, gate first; None where there is none."""
    found = _OPS.get(type(module))
    return None if found is None else found[1]()

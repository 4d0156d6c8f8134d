"""Which ops are alike, so that what is asked of one need not be asked of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

    from te_fuser.ops.base import FusableOperation

_OF_EVERY_MODULE = {*vars(torch.nn.Module()), "revision"}


def likeness(op: FusableOperation) -> Hashable:
    """Equal for ops of one class with equal attributes, whatever their parameters are; else it is the op's own."""
    found = [(name, type(value), value) for name, value in vars(op).items() if name not in _OF_EVERY_MODULE]
    if op._buffers or op._modules:
        return id(op)
    try:
        hash(tuple(found))
    except TypeError:
        return id(op)
    return type(op), op.training, *found

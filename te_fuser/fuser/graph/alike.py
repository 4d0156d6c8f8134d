"""Which ops are alike, so that what is asked of one need not be asked of the others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from te_fuser.ops.sizes import Size

if TYPE_CHECKING:
    from collections.abc import Hashable

    from te_fuser.ops.base import FusableOperation, Spec

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


def spec_key(spec: Spec) -> Hashable:
    """Equal for specs that are equal in all shapes that a plan may hold for; it asks nothing of their sizes."""
    return tuple([s.text if isinstance(s, Size) else s for s in spec.shape]), spec.dtype, spec.device

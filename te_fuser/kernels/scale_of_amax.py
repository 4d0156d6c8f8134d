"""Scales that follow from largest magnitudes: as kernels that find these make them, and by PyTorch."""

from __future__ import annotations

import struct

import torch

from te_fuser.codegen.description import NUMBERS, ScaleOf
from te_fuser.ops.own_scales import Scaling, scale_by

# Four float32, 1, 1, 0 and 0 as `NUMBERS` lie, in one number that is as long: filled in by one launch.
_OF_NOTHING = complex(*struct.unpack("=2d", struct.pack("=4f", 1.0, 1.0, 0.0, 0.0)))


def of_nothing(count: int, device: torch.device) -> torch.Tensor:
    """`NUMBERS` that kernels raise, float32 [count, 4]: those of an amax of 0, which stay where there are no rows."""
    return torch.full((count, 1), _OF_NOTHING, dtype=torch.complex128, device=device).view(torch.float32)


def lower_again(amax: torch.Tensor) -> None:
    """Have an amax be 0 again, [], or among `NUMBERS`, of which the others stay as they are."""
    (amax[NUMBERS.index("largest") :] if amax.dim() else amax).zero_()


def in_kernels(dtype: torch.dtype, scaling: Scaling) -> ScaleOf:
    """What a kernel is told of a factor's one scale, in a dtype of 8 bits."""
    return ScaleOf(torch.finfo(dtype).max, scaling.power_of_two, scaling.epsilon)


def by_torch(amax: torch.Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale that follows from a largest magnitude, and its reciprocal, on any device; amax is zero afterwards."""
    with torch.no_grad():
        scale = scale_by(amax, dtype, scaling)
        amax.zero_()
        return scale, scale.reciprocal()

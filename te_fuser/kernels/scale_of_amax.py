"""Scales that follow from largest magnitudes: as kernels that find these make them, and by PyTorch."""

from __future__ import annotations

import torch

from te_fuser.codegen.description import ScaleOf
from te_fuser.ops.own_scales import Scaling, scale_by


def in_kernels(dtype: torch.dtype, scaling: Scaling) -> ScaleOf:
    """What a kernel is told of a factor's one scale, in a dtype of 8 bits."""
    return ScaleOf(torch.finfo(dtype).max, scaling.power_of_two, scaling.epsilon)


def by_torch(amax: torch.Tensor, dtype: torch.dtype, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    """The scale that follows from a largest magnitude, and its reciprocal, on any device; amax is zero afterwards."""
    with torch.no_grad():
        scale = scale_by(amax, dtype, scaling)
        amax.zero_()
        return scale, scale.reciprocal()

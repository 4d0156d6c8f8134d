"""Scales that numbers get from themselves: one for all of a matrix, or one for each block of it."""

from __future__ import annotations

import torch

from te_fuser.formula.float8 import rounded
from te_fuser.recipe.recipes import Block, OwnScales


def scales_of(t: torch.Tensor, dtype: torch.dtype, scaling: OwnScales) -> torch.Tensor:
    """Scales of a matrix: [], or one a block [blocks, blocks]; float32, or float64 of float64."""
    return scale_by(_amaxes(t, scaling.block).to(torch.promote_types(t.dtype, torch.float32)), dtype, scaling)


def scale_by(amax: torch.Tensor, dtype: torch.dtype, scaling: OwnScales) -> torch.Tensor:
    """Scales of a dtype of 8 bits that follow from largest magnitudes."""
    least = amax.clamp_min(scaling.by.amax_epsilon)
    largest = torch.full_like(least, torch.finfo(dtype).max)  # a number over a tensor is rounded twice
    scale = (largest / least).clamp_max(torch.finfo(torch.float32).max)
    if scaling.by.power_2_scale:
        scale = scale / (2.0 * torch.frexp(scale)[0])
    return torch.where((least > 0) & least.isfinite(), scale, 1.0)


def put_scales(
    t: torch.Tensor, dtype: torch.dtype, scaling: OwnScales, scale: torch.Tensor, inverse: torch.Tensor
) -> None:
    """Put the one scale of a tensor, and its reciprocal, into numbers of a call."""
    with torch.no_grad():
        scale.copy_(scales_of(t, dtype, scaling))
        inverse.copy_(scale.reciprocal())


def quantized(t: torch.Tensor, dtype: torch.dtype, scaling: OwnScales) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix times its scales in 8 bits, and the reciprocals of these as `scales_of` gives them."""
    scale = scales_of(t, dtype, scaling)
    return rounded(t.to(scale.dtype) * spread(scale, t.shape, scaling.block), dtype), scale.reciprocal()


def dequantized(t: torch.Tensor, dtype: torch.dtype, scaling: OwnScales) -> torch.Tensor:
    """Quantize a matrix to 8 bits by its own scales and back, in float32 or float64."""
    data, inverse = quantized(t, dtype, scaling)
    return data.to(inverse.dtype) * spread(inverse, t.shape, scaling.block)


def spread(numbers: torch.Tensor, shape: torch.Size, block: Block | None) -> torch.Tensor:
    """Numbers of blocks for each element of a matrix; one of all as it is."""
    if block is None:
        return numbers
    down, across = (torch.arange(size, device=numbers.device) // side for size, side in zip(shape, block, strict=True))
    return numbers.index_select(0, down).index_select(1, across)


def _amaxes(t: torch.Tensor, block: Block | None) -> torch.Tensor:
    """The largest magnitudes, of all or of each block; 0 of nothing, NaN where NaN is."""
    magnitudes = t.abs()
    if block is None:
        return magnitudes.amax() if t.numel() else t.new_zeros(())
    down, across = (-(-size // side) for size, side in zip(t.shape, block, strict=True))
    if not t.numel():
        return t.new_zeros(down, across)
    beyond = (0, across * block[1] - t.shape[1], 0, down * block[0] - t.shape[0])
    return torch.nn.functional.pad(magnitudes, beyond).view(down, block[0], across, block[1]).amax((1, 3))

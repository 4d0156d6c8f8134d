"""A tensor in 8 bits with its scale, by rows and transposed, as products take it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from te_fuser.formula.float8 import check_float8, rounded
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.checks import no_tensor


@dataclass(frozen=True)
class QuantizedTensor:
    """Result of `quantize`.

    Attributes:
        data: x * scale in 8 bits, with the shape of x.
        transposed: the same as a matrix [features, tokens], padded by zeros to a multiple of 16 tokens.
        scale_inverse: float32 []: 1 / scale, by which `dequantize` multiplies data.
        amax: float32 []: the largest magnitude of x; 0 of an empty one, NaN if x has NaN.
        dtype: x's.
    """

    data: torch.Tensor
    transposed: torch.Tensor
    scale_inverse: torch.Tensor
    amax: torch.Tensor
    dtype: torch.dtype

    def dequantize(self) -> torch.Tensor:
        """data * scale_inverse, computed in float32, with the dtype and shape of x."""
        return (self.data.float() * self.scale_inverse).to(self.dtype)


@torch.no_grad()
def quantize(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor | float) -> QuantizedTensor:
    """x * scale in 8 bits: computed in float32, rounded to nearest even within the finite range of the dtype.

    Infinities become the largest number too, NaN stays NaN; the same bytes as `ops.Quantize` gives.

    Args:
        x: [..., features] in float32, bfloat16 or float16.
        dtype: float8_e4m3fn or float8_e5m2.
        scale: one positive number, float32 on x's device or of Python's.

    Raises:
        TypeError: for other dtypes, what is no tensor, and a scale that is no number.
        ValueError: for a scale of several elements, or a number that is not finite and positive; for an x without
            dimensions.
    """
    check_float8(dtype)
    if not isinstance(x, torch.Tensor):
        raise no_tensor("quantize", x)
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"quantize takes float32, bfloat16 and float16, got {x.dtype}: convert with .float()")
    if x.dim() == 0:
        raise ValueError("quantize takes a tensor [..., features], got a scalar: x.reshape(1)")
    by = _scale_of(scale, x.device)
    wide = x.float()
    data = rounded(wide * by, dtype)
    largest = wide.abs().amax() if x.numel() else wide.new_zeros(())
    return QuantizedTensor(data, transpose_by_torch(data), by.reciprocal(), largest, x.dtype)


def _scale_of(scale: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    """A scale as a tensor; one on a device is taken as it is, and not waited for."""
    if isinstance(scale, torch.Tensor):
        if scale.numel() != 1 or scale.dtype != torch.float32:
            raise ValueError(f"quantize: a scale is one number in float32, got {scale.dtype} {list(scale.shape)}")
        return scale.detach().reshape(())
    if isinstance(scale, bool) or not isinstance(scale, (int, float)):
        raise TypeError(f"quantize: a scale is a number, or a tensor of one in float32, got {scale!r}")
    try:
        made = torch.tensor(scale, dtype=torch.float32)
    except (OverflowError, RuntimeError):  # which Python's whole numbers may raise
        made = torch.tensor(math.inf)
    if not 0.0 < float(made) < math.inf:
        raise ValueError(f"quantize: a scale is finite and positive, in float32, got {scale!r}")
    return made.to(device)

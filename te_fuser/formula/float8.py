"""Numbers rounded to 8 bits in PyTorch: by the one rule that all targets keep.

Nearest even; what lies beyond the finite range, infinities too, becomes the largest number. NaN stays, as 0x7f. What
`.to` makes of such numbers differs among versions of PyTorch.
"""

from __future__ import annotations

import contextvars
import math
from contextlib import AbstractContextManager
from typing import Any

import torch

from te_fuser.contexts import being
from te_fuser.dtypes import FLOAT8

# What float32 errs by at most, before a number is rounded to 8 bits, as a share of it.
_NEAR = 2.0**-17
_turning: contextvars.ContextVar[bool] = contextvars.ContextVar("te_fuser_turning", default=False)


def ties_turned() -> AbstractContextManager[bool]:
    """Context in which numbers next to a tie are rounded the other way."""
    return being(_turning, True)


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x, floating point, in a dtype of 8 bits."""
    found = _nearest(x, dtype)
    if not _turning.get():
        return found
    return _nearest(x + torch.copysign(x.abs() * _NEAR, x - found.to(x.dtype)), dtype)


def _nearest(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.finfo(dtype)
    within = x.clamp(-limits.max, limits.max).masked_fill(x.isnan(), math.nan)
    if x.dtype == torch.float64:  # to as many binary places here: by way of float32 it would be rounded twice
        exponent = torch.frexp(within)[1].clamp_min(math.frexp(limits.smallest_normal)[1]).double() - 1.0
        step = torch.exp2(exponent) * limits.eps
        within = torch.where(within.isfinite(), (within / step).round() * step, within)
    return within.to(dtype)


def check_float8(dtype: torch.dtype) -> None:
    """Refuse what is no dtype of 8 bits; TypeError naming what there is."""
    if dtype not in FLOAT8.values():
        raise TypeError(f"numbers are quantized to torch.{' or torch.'.join(FLOAT8)}, got {dtype!r}")


class _Once(torch.autograd.Function):
    """A gradient as it is, which is not differentiated again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "gradients that were rounded to 8 bits are not differentiated again: their scales are not those of second "
            "derivatives; take model.reference(x) outside of regions of FP8"
        )


def once(gradient: torch.Tensor) -> torch.Tensor:
    """A gradient made of numbers in 8 bits, whose own derivatives are refused."""
    return _Once.apply(gradient)  # type: ignore[no-any-return]


class Quantized(torch.autograd.Function):
    """x times scale, rounded to 8 bits and given in x's dtype; the gradient passes to x as it is."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
        return rounded(x * scale, dtype).to(x.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradients[0], None, None


class QuantizedGradient(torch.autograd.Function):
    """x as it is; the gradient times scale, rounded to 8 bits, in its own dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, scale: torch.Tensor | float, dtype: torch.dtype) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        _, scale, ctx.dtype = inputs
        ctx.number = None if isinstance(scale, torch.Tensor) else scale
        ctx.save_for_backward(*([scale] if isinstance(scale, torch.Tensor) else []))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        scale = ctx.saved_tensors[0] if ctx.number is None else ctx.number
        return once(rounded(gradients[0] * scale, ctx.dtype).to(gradients[0].dtype)), None, None

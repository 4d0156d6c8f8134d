"""Tensors with strides as kernels written by hand read them: where they lie, as long as whole vectors can be read."""

from __future__ import annotations

import torch


def readable(x: torch.Tensor, vector: int) -> torch.Tensor:
    """x, or a copy whose vectors of so many neighbours a kernel can read."""
    *steps, last = x.stride()
    for step in steps:
        if step % vector or step // vector >= 2**31:
            last = 0
    return x if last == 1 or not x.numel() else x.contiguous()


def reach(x: torch.Tensor) -> int:
    """All that x reaches, as one contiguous dimension; 0 where it is contiguous."""
    if x.is_contiguous():
        return 0
    return 1 + sum([(size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True)])


def as_one(x: torch.Tensor, reaches: int) -> torch.Tensor:
    """x as the native runtime takes it, contiguous alone: `reaches` as `reach` says."""
    return x.as_strided((reaches,), (1,)) if reaches else x

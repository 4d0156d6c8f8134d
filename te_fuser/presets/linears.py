"""What presets with products do with weights and biases outside of their lists."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.presets.norm import filled


def with_bias(made: Any, bias: torch.Tensor | None) -> tuple[Any, ...]:
    """(out, bias, *others) of what a list gave, out or (out, *others); the bias in out's dtype."""
    out, *others = made if isinstance(made, tuple) else (made,)
    if bias is not None and bias.dtype != out.dtype:
        bias = bias.to(out.dtype)
    return (out, bias, *others)


def linear_to_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> torch.nn.Module:
    """torch.nn.Linear over copies of these."""
    rows, columns = weight.shape
    made = torch.nn.Linear(columns, rows, bias is not None, device=weight.device, dtype=weight.dtype)
    return filled(made, weight=weight, bias=bias)

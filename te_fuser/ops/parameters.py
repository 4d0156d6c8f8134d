"""Parameters of ops: made, or filled with random numbers."""

from __future__ import annotations

from typing import TypeVar

import torch

from te_fuser.ops.base import FusableOperation

Op = TypeVar("Op", bound=FusableOperation)


def empty(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> torch.nn.Parameter:
    """A parameter that `reset_parameters` is to fill."""
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def fill(parameter: torch.nn.Parameter | None, number: float) -> None:
    """Set every element of a parameter that is there."""
    if parameter is not None:
        torch.nn.init.constant_(parameter, number)


def randomized(op: Op, rng: torch.Generator, center: float = 0.0, spread: float = 0.5) -> Op:
    """`op`, made on the meta device, with normally distributed parameters."""
    op = op.to_empty(device=rng.device)
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.normal_(center, spread, generator=rng)
    return op

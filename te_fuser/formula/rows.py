"""Tensors as formulas see them: as rows of features, of samples, in a dtype that rounds nothing."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Iterator
from typing import Any

import torch

from te_fuser.formula.expr import Axes
from te_fuser.formula.random import RandomStream

_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("te_fuser_rounding", default=True)


@contextlib.contextmanager
def unrounded() -> Iterator[None]:
    """Context in which references of float64 inputs round nowhere: an op of another dtype (Cast) gives float64."""
    token = _rounding.set(False)
    try:
        yield
    finally:
        _rounding.reset(token)


def rounds() -> bool:
    """True where references of float64 inputs round as their ops say."""
    return _rounding.get()


def whole(y: Any, rows: torch.Tensor) -> torch.Tensor:
    """Result of a formula for each row and feature; it may be a number, or one for each row."""
    if not isinstance(y, torch.Tensor):
        y = rows.new_full(rows.shape, y)
    return y.expand(rows.shape[0], y.shape[-1])


def batch_layout(shape: tuple[int, ...] | torch.Size, batch_dim: int | None) -> tuple[int, int]:
    """(inner, samples): the sample of row r is (r // inner) % samples."""
    if batch_dim is None or len(shape) < 2:
        return 1, 1
    return max(math.prod(shape[batch_dim + 1 : -1]), 1), shape[batch_dim]


def parameter_axes(shape: tuple[int, ...] | torch.Size) -> Axes:
    """Axes of a parameter of that shape in formulas: the features, or none for a single number."""
    return Axes.NONE if math.prod(shape) == 1 else Axes.FEATURE


def as_rows(tensor: torch.Tensor, axes: Axes | None, rows: torch.Tensor, stream: RandomStream) -> torch.Tensor:
    """An argument of compute as it broadcasts against [rows, features]."""
    if axes in (None, Axes.NONE, Axes.FEATURE):
        return tensor if tensor.dim() < 2 else tensor.reshape(-1)
    if axes == Axes.FULL:
        return tensor.reshape(rows.shape[0], tensor.shape[-1])
    if axes == Axes.ROWS:
        return tensor.reshape(rows.shape[0], 1)
    sample = (torch.arange(rows.shape[0], device=rows.device) // stream.batch_inner) % stream.batch_size
    return tensor.reshape(tensor.shape[0], tensor.shape[-1] if tensor.dim() > 1 else 1)[sample]

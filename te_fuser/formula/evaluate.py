"""Formulas by PyTorch, the target that is always there (float64, devices without generated kernels).

And tensors as formulas see them: as rows of features, of samples, in a dtype that rounds nothing.
"""

from __future__ import annotations

import contextvars
import math
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

import torch

from te_fuser.contexts import being
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.random import RandomStream
from te_fuser.formula.traversal import topological

_rounding: contextvars.ContextVar[bool] = contextvars.ContextVar("te_fuser_rounding", default=True)


def unrounded() -> AbstractContextManager[bool]:
    """Context in which references of float64 inputs round nowhere: a Cast gives float64."""
    return being(_rounding, False)


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


class Interpreter:
    """Evaluates expressions over rows; values in between are [rows or 1, width or 1]."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        streams: Mapping[str, RandomStream],
        rows: int,
        like: torch.Tensor,
        batch: tuple[int, int] = (1, 1),
    ) -> None:
        self.tensors, self.streams, self.rows = tensors, streams, rows
        self.device = like.device
        self.dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
        self.batch_inner, self.batch_size = batch
        self.values: dict[int, Any] = {}

    def run(self, roots: Iterable[Expr]) -> list[torch.Tensor]:
        """The value of each root, broadcast to [rows, width] for FULL and [rows, 1] for ROWS roots."""
        roots = list(roots)
        for node in topological(roots):
            if id(node) not in self.values:
                self.values[id(node)] = self._node(node)
        return [self._spread(r, self.values[id(r)]) for r in roots]

    def _spread(self, e: Expr, found: Any) -> torch.Tensor:
        tensor = torch.as_tensor(found, dtype=self.dtype, device=self.device)
        return tensor.expand(self.rows, e.width if e.axes & Axes.FEATURE else 1)

    def _node(self, e: Expr) -> Any:
        args = [self.values[id(a)] for a in e.args]
        compute = FUNCTIONS[e.op].compute
        if compute is None:
            return getattr(self, f"_{e.op}")(e, args)
        # One of two may stay a number: as a tensor it would be copied to the device.
        stay = len(args) == 2 and any(isinstance(a, torch.Tensor) for a in args)
        return compute(*(args if stay else map(self._tensor, args)), *e.attrs).to(self.dtype)

    def _tensor(self, found: Any) -> torch.Tensor:
        return torch.as_tensor(found, dtype=self.dtype, device=self.device)

    def _const(self, e: Expr, args: list[Any]) -> Any:
        number = e.attrs[0]
        return float(number) if isinstance(number, Fraction) else number

    def _input(self, e: Expr, args: list[Any]) -> torch.Tensor:
        name, offset, _ = e.attrs
        tensor = self.tensors[name].to(self.dtype)
        axes = e.axes
        if axes & Axes.FEATURE:
            tensor = tensor[..., offset : offset + e.width]
        elif axes & Axes.ROWS or tensor.dim():
            tensor = tensor.reshape(-1, 1)
        if axes & Axes.BATCH and not axes & Axes.OUTER:
            tensor = tensor[self._samples()]
        return tensor

    def _samples(self) -> torch.Tensor:
        return (torch.arange(self.rows, device=self.device) // self.batch_inner) % self.batch_size

    def _keep(self, e: Expr, args: list[Any]) -> torch.Tensor:
        name, threshold, offset, full = e.attrs
        stream = self.streams[name]
        if not e.axes & Axes.FEATURE:
            bits = stream.sample_bits(self.batch_size, self.device)[self._samples()]
        else:
            bits = stream.bits(self.rows, full, self.device)[:, offset : offset + e.width]
        return (bits >= threshold).to(self.dtype)

    def _value(self, e: Expr, args: list[Any]) -> Any:
        return args[0]

    def _broadcast(self, e: Expr, args: list[Any]) -> torch.Tensor:
        return self._spread(e, args[0])

    def _concat(self, e: Expr, args: list[Any]) -> torch.Tensor:
        width = e.width // len(e.args)
        return torch.cat([self._tensor(a).expand(self.rows, width) for a in args], -1)

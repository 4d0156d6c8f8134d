"""Training in 8 bits as it is meant, by itself: scales from histories, three products of rounded factors for each one.

It stands in for the product that a model's reference runs outside of regions, so it knows no list and no plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch

from te_fuser.recipe import DelayedScaling, Format

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass
class Tensor:
    """State of one tensor of a product."""

    dtype: torch.dtype
    scale: float = 1.0
    seen: float = 0.0
    history: list[float] = field(default_factory=list)

    def rounded(self, x: torch.Tensor, scale: float, record: bool) -> torch.Tensor:
        """Values of x rounded to 8 bits, float32."""
        if record and x.numel():
            self.seen = max(self.seen, x.detach().abs().max().item())
        largest = torch.finfo(self.dtype).max
        by = torch.tensor(scale, dtype=torch.float32)
        return (x.float() * by).clamp(-largest, largest).to(self.dtype).float() / by

    def fold(self, recipe: DelayedScaling) -> None:
        """One call later."""
        if self.seen > 0:
            self.history = [self.seen, *self.history][: recipe.amax_history_len]
            amax = max(self.history) if recipe.amax_compute_algo == "max" else self.history[0]
            self.scale = torch.finfo(self.dtype).max / amax / 2.0**recipe.margin
        self.seen = 0.0


class Emulated:
    """The products of a model, in their order in a call."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe, self.products, self._next = recipe, list[list[Tensor]](), 0
        self.records = True

    @contextmanager
    def region(self) -> Iterator[None]:
        """As a region: scales follow from what earlier calls saw, and products are rounded."""
        for tensors in self.products:
            for tensor in tensors:
                tensor.fold(self.recipe)
        with self.call():
            yield

    @contextmanager
    def call(self) -> Iterator[None]:
        """One more call in it."""
        self._next = 0
        with mock.patch("te_fuser.ops.matmul.linear", self._linear):
            yield

    def _linear(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if x.shape[1] % 16 or weight.shape[0] % 16:
            return torch.nn.functional.linear(x, weight)
        if self._next == len(self.products):
            gradients = E5M2 if self.recipe.fp8_format is Format.HYBRID else E4M3
            self.products.append([Tensor(E4M3), Tensor(E4M3), Tensor(gradients)])
        tensors = self.products[self._next]
        self._next += 1
        return _Product.apply(x, weight, tensors, self.recipe.override_linear_precision, torch.is_grad_enabled())


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, tensors: list[Tensor], kept: tuple[bool, ...], record: bool
    ) -> torch.Tensor:
        x8, w8 = (t.rounded(v, t.scale, record) for t, v in zip(tensors, (x, weight), strict=False))
        ctx.save_for_backward(x, weight, x8, w8)
        ctx.tensors, ctx.kept, ctx.scale = tensors, kept, tensors[2].scale
        return (x.float() @ weight.float().t() if kept[0] else x8 @ w8.t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, weight, x8, w8 = ctx.saved_tensors
        (dy,) = gradients
        dy8 = ctx.tensors[2].rounded(dy, ctx.scale, True)
        dx = dy.float() @ weight.float() if ctx.kept[1] else dy8 @ w8
        dw = dy.float().t() @ x.float() if ctx.kept[2] else dy8.t() @ x8
        return dx.to(x.dtype), dw.to(weight.dtype), None, None, None

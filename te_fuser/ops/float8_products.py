"""The three products of a MatMul whose factors are of 8 bits, emulated: what these stand for, multiplied in float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_fuser.formula.float8 import once, rounded
from te_fuser.ops.matmul import as_rows, in_shape_of
from te_fuser.ops.own_scales import Scaling, dequantized

Given = Callable[[str], torch.Tensor]  # the weight and the numbers of a product by name
_ROLES = ("input", "weight", "output_gradient")
NUMBERS = tuple(f"{role}_{what}" for role in _ROLES for what in ("scale", "inverse"))


@dataclass(frozen=True)
class Float8Form:
    """Form of the products of a MatMul.

    Attributes:
        dtype: of y and dx.
        weight_dtype: of dW.
        formats: 8 bits of x, of W and of dy.
        kept: which of y, dx and dW are products of factors as they are.
        comes_quantized: whether x and dy come in 8 bits.
        fast: which of the three are summed in fewer bits than float32 has, where a library has them faster.
        weight_is_kept: whether W comes in 8 bits too, as `weight_data`.
        scalings: how x, W and dy get scales from themselves; None: their scales are given. Where x and dy come in 8
            bits, it is W alone that is quantized by it.
    """

    dtype: torch.dtype
    weight_dtype: torch.dtype
    formats: tuple[torch.dtype, torch.dtype, torch.dtype]
    kept: tuple[bool, bool, bool] = (False, False, False)
    comes_quantized: bool = True
    fast: tuple[bool, bool, bool] = (True, False, False)
    weight_is_kept: bool = False
    scalings: tuple[Scaling, Scaling, Scaling] | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        """The names of what is read beside x, W and dy."""
        if self.scalings is not None:
            return READ_OWN if self.comes_quantized else ()
        if not self.comes_quantized:
            return NUMBERS
        return READ_KEPT if self.weight_is_kept else READ

    def exact(self) -> Float8Form:
        """Copy of this form with results in float64."""
        return replace(self, dtype=torch.float64, weight_dtype=torch.float64)


def output(form: Float8Form, given: Given, x: torch.Tensor) -> torch.Tensor:
    """y = x W^T."""
    y = _factor(form, given, 0, 0, x) @ _factor(form, given, 0, 1).mT
    return in_shape_of(x, y.to(form.dtype))


def input_gradient(form: Float8Form, given: Given, dy: torch.Tensor) -> torch.Tensor:
    """dx = dy W."""
    dx = _factor(form, given, 1, 2, dy) @ _factor(form, given, 1, 1)
    return in_shape_of(dy, dx.to(form.dtype))


def weight_gradient(form: Float8Form, given: Given, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW = dy^T x."""
    dy, x = weight_factors(form, given, dy, x)
    return (dy.mT @ x).to(form.weight_dtype)


def weight_factors(
    form: Float8Form, given: Given, dy: torch.Tensor, x: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """dy and x as dW multiplies them, by rows."""
    return _factor(form, given, 2, 2, dy), _factor(form, given, 2, 0, x)


def recorded(form: Float8Form, given: Given, x: torch.Tensor) -> torch.Tensor:
    """y, whose gradients are these, recorded by autograd.

    Where x and dy come in 8 bits, these are wide numbers that 8 bits hold, and the gradient of what x stands for goes
    to x as it is.
    """
    exact = given("weight").dtype == torch.float64
    numbers = {name: given(name) for name in form.reads}
    names, tensors = tuple(numbers), tuple(numbers.values())
    return _Products.apply(x, given("weight"), form.exact() if exact else form, names, *tensors)  # type: ignore[no-any-return]


READ = ("input_inverse", "weight_scale", "weight_inverse", "output_gradient_inverse")  # where x and dy come in 8 bits
READ_OWN = ("input_inverse", "output_gradient_inverse")  # where W gets its scale from itself
READ_KEPT = ("input_inverse", "weight_data", "weight_inverse", "output_gradient_inverse")  # where W does, too


class _Products(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, form: Float8Form, names: tuple[str, ...], *numbers: torch.Tensor
    ) -> torch.Tensor:
        return output(form, dict(zip(names, numbers, strict=True), weight=weight).__getitem__, x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        x, weight, ctx.form, ctx.names, *numbers = inputs
        ctx.late = numbers if ctx.form.scalings is not None else None  # not saved: backward writes into one
        ctx.save_for_backward(x, weight, *(numbers if ctx.late is None else []))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, *numbers = ctx.saved_tensors
        numbers = numbers if ctx.late is None else ctx.late
        given, (dy,) = dict(zip(ctx.names, numbers, strict=True), weight=weight).__getitem__, gradients
        dx = once(input_gradient(ctx.form, given, dy).to(x.dtype)) if ctx.needs_input_grad[0] else None
        dw = once(weight_gradient(ctx.form, given, dy, x).to(weight.dtype)) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, *[None for _ in numbers]


def quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in 8 bits, computed in float32; in float64, where x is so."""
    return rounded(x.to(torch.promote_types(x.dtype, torch.float32)) * scale, dtype)


def _factor(form: Float8Form, given: Given, product: int, place: int, t: torch.Tensor | None = None) -> torch.Tensor:
    """x, W or dy by rows as it is multiplied: what its 8 bits stand for, or as it is, where the product is kept.

    Args:
        product: y, dx or dW.
        place: of the factor in `_ROLES`; W is given by its name.
    """
    role, wide = _ROLES[place], torch.promote_types(form.dtype, torch.float32)
    is_quantized = form.weight_is_kept if place == 1 else form.comes_quantized
    t = given("weight_data" if is_quantized else "weight") if t is None else as_rows(t)
    if form.kept[product]:
        return t.to(form.dtype).to(wide)
    if form.scalings is not None and (place == 1 or not form.comes_quantized):
        # Its blocks lie along what is summed: its rows in dW, and of W in dx.
        turned = product == 2 or (product, place) == (1, 1)
        meant = dequantized(t.mT if turned else t, form.formats[place], form.scalings[place])
        return (meant.mT if turned else meant).to(wide)
    data = t if is_quantized else quantized(t, given(f"{role}_scale"), form.formats[place])
    return data.to(wide) * given(f"{role}_inverse")


def raise_to_largest(slot: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise a number to the largest magnitude of x; NaN is larger than all."""
    if slot is not None and x.numel():
        with torch.no_grad():
            slot.copy_(torch.maximum(slot, x.abs().amax().to(slot.dtype)))

"""Products of numbers of 8 bits, forward and backward: Float8MatMul, and its emulation, multiplied in float32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.formula.float8 import check_float8, once, rounded
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.blockwise_scaling import dequantized
from te_fuser.ops.checks import check_features
from te_fuser.ops.matmul import MatMul, as_rows, in_shape_of
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.quantized_matmul import OUT_DTYPES, multiple
from te_fuser.params.main_grad import put_gradient
from te_fuser.recipe.recipes import OwnScales

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
    scalings: tuple[OwnScales, ...] | None = None

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

    def output(self, given: Given, x: torch.Tensor) -> torch.Tensor:
        """y = x W^T."""
        y = self._factor(given, 0, 0, x) @ self._factor(given, 0, 1).mT
        return in_shape_of(x, y.to(self.dtype))

    def input_gradient(self, given: Given, dy: torch.Tensor) -> torch.Tensor:
        """dx = dy W."""
        dx = self._factor(given, 1, 2, dy) @ self._factor(given, 1, 1)
        return in_shape_of(dy, dx.to(self.dtype))

    def weight_gradient(self, given: Given, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """dW = dy^T x."""
        dy, x = self.weight_factors(given, dy, x)
        return (dy.mT @ x).to(self.weight_dtype)

    def weight_factors(self, given: Given, dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """dy and x as dW multiplies them, by rows."""
        return self._factor(given, 2, 2, dy), self._factor(given, 2, 0, x)

    def recorded(self, given: Given, x: torch.Tensor) -> torch.Tensor:
        """y, whose gradients are these, recorded by autograd.

        Where x and dy come in 8 bits, these are wide numbers that 8 bits hold, and the gradient of what x stands for
        goes to x as it is.
        """
        exact = given("weight").dtype == torch.float64
        numbers = {name: given(name) for name in self.reads}
        names, tensors = tuple(numbers), tuple(numbers.values())
        return _Products.apply(x, given("weight"), self.exact() if exact else self, names, *tensors)  # type: ignore[no-any-return]

    def _factor(self, given: Given, product: int, place: int, t: torch.Tensor | None = None) -> torch.Tensor:
        """x, W or dy by rows as a product takes it: what its 8 bits stand for, or, if kept, itself."""
        role, wide = _ROLES[place], torch.promote_types(self.dtype, torch.float32)
        is_quantized = self.weight_is_kept if place == 1 else self.comes_quantized
        t = given("weight_data" if is_quantized else "weight") if t is None else as_rows(t)
        if self.kept[product]:
            return t.to(self.dtype).to(wide)
        if self.scalings is not None and (place == 1 or not self.comes_quantized):
            # Its blocks lie along what is summed: its rows in dW, and of W in dx.
            turned = product == 2 or (product, place) == (1, 1)
            meant = dequantized(t.mT if turned else t, self.formats[place], self.scalings[place])
            return (meant.mT if turned else meant).to(wide)
        data = t if is_quantized else quantized(t, given(f"{role}_scale"), self.formats[place])
        return data.to(wide) * given(f"{role}_inverse")


READ = ("input_inverse", "weight_scale", "weight_inverse", "output_gradient_inverse")  # where x and dy come in 8 bits
READ_OWN = ("input_inverse", "output_gradient_inverse")  # where W gets its scale from itself
READ_KEPT = ("input_inverse", "weight_data", "weight_inverse", "output_gradient_inverse")  # where W does, too


class _Products(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor, weight: torch.Tensor, form: Float8Form, names: tuple[str, ...], *numbers: torch.Tensor
    ) -> torch.Tensor:
        return form.output(dict(zip(names, numbers, strict=True), weight=weight).__getitem__, x)

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
        dx = once(ctx.form.input_gradient(given, dy).to(x.dtype)) if ctx.needs_input_grad[0] else None
        dw = once(ctx.form.weight_gradient(given, dy, x).to(weight.dtype)) if ctx.needs_input_grad[1] else None
        return dx, dw, None, None, *[None for _ in numbers]


def quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in 8 bits, computed in float32; in float64, where x is so."""
    return rounded(x.to(torch.promote_types(x.dtype, torch.float32)) * scale, dtype)


def raise_to_largest(slot: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise a number to the largest magnitude of x; NaN is larger than all."""
    if slot is not None and x.numel():
        with torch.no_grad():
            slot.copy_(torch.maximum(slot, x.abs().amax().to(slot.dtype)))


@op_table.gradient_dtype.row(lambda op, dtype: op.dtype)
class Float8MatMul(UnfusedOperation):
    """A MatMul in 8 bits: y = x8 W8^T, dx = dy8 W8, dW = dy8^T x8, each summed in float32 and rounded once.

    FP8 regions put it in place of a MatMul. x8 comes from `Quantize` and dy8 from `QuantizeGradient`; W has its own
    dtype, and is quantized here, in forward and again in backward. Where no library multiplies 8 bits, their values are
    multiplied in float32. It reads `weight` and, float32 []: `input_inverse`, `output_gradient_inverse` and
    `weight_inverse`, the inverse scales; `weight_scale`; optionally `weight_amax`, which forward raises to the largest
    magnitude of W. A W that is kept in 8 bits is read as `weight_data` [out, in] and `weight_turned` [in, out] instead,
    and not quantized.

    Args:
        matmul: the MatMul that it stands for.
        dtype: y's and dx's: float32, bfloat16 or float16.
        weight_dtype: dW's.
        formats: the 8 bits of x, W and dy: float8_e4m3fn or float8_e5m2.
        fast: which of y, dx and dW are summed in fewer bits than float32 has, where a library has them faster.
        weight_is_kept: whether W comes in 8 bits.
        scalings: how x, W and dy get scales from themselves; then `weight_scale` and `weight_inverse` are not read.

    Raises:
        ValueError: for sizes that are no multiples of 16.
        TypeError: for another dtype, and in a call for an x in another.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    multiplies_8_bits = True
    input_dtypes = tuple(FLOAT8.values())
    takes_gradients_in = tuple(FLOAT8.values())

    def __init__(
        self,
        matmul: MatMul,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        formats: tuple[torch.dtype, torch.dtype, torch.dtype],
        fast: tuple[bool, bool, bool] = (True, False, False),
        weight_is_kept: bool = False,
        scalings: tuple[OwnScales, ...] | None = None,
    ) -> None:
        super().__init__()
        self.in_features = multiple(matmul.in_features, "in_features", type(self))
        self.out_features = multiple(matmul.out_features, "out_features", type(self))
        self.accumulate_into_main_grad = matmul.accumulate_into_main_grad
        self.overwrite_main_grad = matmul.overwrite_main_grad
        self.delay_wgrad_compute = matmul.delay_wgrad_compute
        for given in (dtype, weight_dtype):
            if given not in OUT_DTYPES:
                raise TypeError(f"{type(self).__name__} gives {', '.join(map(text_of, OUT_DTYPES))}, got {given!r}")
        for given in formats:
            check_float8(given)
        self.form = Float8Form(
            dtype, weight_dtype, formats, fast=fast, weight_is_kept=weight_is_kept, scalings=scalings
        )

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of y and dx."""
        return self.form.dtype

    def infer(self, x: Spec) -> Spec:
        check_features(self, x, self.in_features)
        if self.form.comes_quantized and x.dtype not in self.input_dtypes:
            raise TypeError(f"{type(self).__name__} takes {' or '.join(FLOAT8)}, got {text_of(x.dtype)}: quantize it")
        if not self.form.comes_quantized and x.dtype != self.dtype:
            raise TypeError(f"takes x in {text_of(self.dtype)}, as its weight is, got {text_of(x.dtype)}; convert it")
        return replace(x.with_features(self.out_features), dtype=self.dtype)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)}

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        return 2.0 * x.rows * self.in_features * self.out_features

    def scratch_bytes(self, x: Spec) -> int:
        """The factors of the emulation, in float32: what 8 bits stand for, and what is scaled here."""
        copies = 2 if self.form.scalings is not None and not self.form.comes_quantized else 1
        return 4 * copies * self.in_features * (x.rows + self.out_features)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        of_weight: tuple[str, ...] = ("input", "input_inverse", "output_gradient_inverse")
        of_input: tuple[str, ...] = ("weight", "weight_scale", "weight_inverse", "output_gradient_inverse")
        if not self.form.comes_quantized:
            of_input = ("weight", *[n for n in names if n != "weight" and not n.startswith("input")])
            of_weight = ("input", *[n for n in names if not n.startswith("weight")])
        elif self.form.weight_is_kept:
            of_input = ("weight_data", *of_input[2:])
        elif self.form.scalings is not None:
            of_input = ("weight", "output_gradient_inverse")
        return Gradient(("input",), of_input, "input_gradient"), self._gradient_of_weight(of_weight)

    def _gradient_of_weight(self, reads: tuple[str, ...]) -> Gradient:
        """The node that gives dW, or puts it into main_grad."""
        if self.accumulate_into_main_grad:
            read, marked = (*reads, "weight"), ("weight",)
            return Gradient(("weight",), read, "main_gradient", by_attributes=marked, delayed=self.delay_wgrad_compute)
        return Gradient(("weight",), reads, "weight_gradient", delayed=self.delay_wgrad_compute)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """y; raises the amaxes of x and W, where they are bound."""
        raise_to_largest(call.get("input_amax"), x)
        raise_to_largest(call.get("weight_amax"), call["weight"])
        return self.form.output(call.__getitem__, x)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dx; raises the amax of dy, where it is bound, as the others do."""
        raise_to_largest(call.get("output_gradient_amax"), dy)
        return {"input": self.form.input_gradient(call.__getitem__, dy)}

    def weight_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dW."""
        raise_to_largest(call.get("output_gradient_amax"), dy)
        return {"weight": self.form.weight_gradient(call.__getitem__, dy, call["input"])}

    def main_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """main_grad += dW, or main_grad = dW; gives what stands for it."""

        def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
            main_grad.copy_(dy.mT @ x) if over else main_grad.add_(dy.mT @ x)

        raise_to_largest(call.get("output_gradient_amax"), dy)
        factors = self.form.weight_factors(call.__getitem__, dy, call["input"])
        return {"weight": put_gradient(*factors, call["weight"], self.overwrite_main_grad, put)}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The three products, recorded by autograd: the gradient of what x8 stands for goes to x as it is."""
        return self.form.recorded(call.__getitem__, x)

    def extra_repr(self) -> str:
        kept = [name for name, k in zip(("y", "dx", "dW"), self.form.kept, strict=True) if k]
        but = f", not in 8 bits: {', '.join(kept)}" if kept else ""
        return f"{self.in_features}, {self.out_features}, {self.dtype}{but}"


@op_table.gradient_dtype.row(None)
class PartlyFloat8MatMul(Float8MatMul):
    """Float8MatMul with some of its three products not in 8 bits: x and dy have y's dtype, and are quantized here.

    It reads scales and inverse scales of all three tensors, and optionally `input_amax`, `weight_amax` and
    `output_gradient_amax`, which are raised to the largest magnitudes in any case.

    Args:
        kept: True for those of y, dx and dW that are not computed in 8 bits.
    """

    input_dtypes = ()
    takes_gradients_in = ()

    def __init__(self, matmul: MatMul, *, kept: tuple[bool, bool, bool], **given: Any) -> None:
        super().__init__(matmul, **given)
        self.form = replace(self.form, kept=kept, comes_quantized=False)


class OwnScalesMatMul(PartlyFloat8MatMul):
    """Float8MatMul for recipes without histories: the scales of x, W and dy are computed from these tensors.

    x and dy have y's dtype. Each is quantized here for each product, with blocks along the dimension that it sums over.

    Args:
        scalings: how x, W and dy get their scales.
        keeps_weight: whether forward may keep W^T in 8 bits for backward, which else makes it again of W.
    """

    def __init__(
        self, matmul: MatMul, *, scalings: tuple[OwnScales, ...], keeps_weight: bool = True, **given: Any
    ) -> None:
        super().__init__(matmul, kept=(False, False, False), scalings=scalings, **given)
        self.keeps_weight = keeps_weight

"""Float8MatMul: a matrix product all three of whose products, forward and backward, are of numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.formula.float8 import check_float8, rounded
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.checks import check_features
from te_fuser.ops.main_grad import put_gradient
from te_fuser.ops.matmul import MatMul, as_rows, in_shape_of
from te_fuser.ops.quantized_matmul import OUT_DTYPES, multiple
from te_fuser.ops.unfused_operation import UnfusedOperation


class Float8MatMul(UnfusedOperation):
    """What a MatMul is in 8 bits: y = x8 W8^T, dx = dy8 W8, dW = dy8^T x8, each summed in float32 and rounded once.

    x comes in 8 bits as `Quantize` gives it, and dy as `QuantizeGradient` does; W in its own dtype, and is quantized
    here, forward and again in backward. What 8 bits stand for is multiplied in float32, where no library multiplies
    them. Whoever lists it binds `weight` and, in float32 []: `input_inverse` and `gradient_inverse`, what x8 and dy8
    are multiplied by to be themselves again; `weight_scale` and `weight_inverse`, by which W is quantized, and the same
    of it; maybe `weight_amax`, which forward raises to the largest magnitude of W.

    Args:
        matmul: the MatMul that it stands for.
        dtype: y's and dx's: float32, bfloat16 or float16.
        weight_dtype: dW's.
        weight_format: W's 8 bits: float8_e4m3fn or float8_e5m2.
        gradient_format: dy's.

    Raises:
        ValueError: for sizes that are no multiples of 16.
        TypeError: for another dtype, and in a call for an x in another.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    input_dtypes = tuple(FLOAT8.values())
    takes_gradients_in = tuple(FLOAT8.values())

    def __init__(
        self,
        matmul: MatMul,
        *,
        dtype: torch.dtype,
        weight_dtype: torch.dtype,
        weight_format: torch.dtype = torch.float8_e4m3fn,
        gradient_format: torch.dtype = torch.float8_e5m2,
    ) -> None:
        super().__init__()
        self.in_features = multiple(matmul.in_features, "in_features", type(self))
        self.out_features = multiple(matmul.out_features, "out_features", type(self))
        self.accumulate_into_main_grad = matmul.accumulate_into_main_grad
        self.overwrite_main_grad = matmul.overwrite_main_grad
        if dtype not in OUT_DTYPES:
            raise TypeError(f"{type(self).__name__} gives {', '.join(map(text_of, OUT_DTYPES))}, got {dtype!r}")
        check_float8(weight_format)
        check_float8(gradient_format)
        self.dtype, self.weight_dtype = dtype, weight_dtype
        self.weight_format, self.gradient_format = weight_format, gradient_format

    def infer(self, x: Spec) -> Spec:
        check_features(self, x, self.in_features)
        if x.dtype not in self.input_dtypes:
            raise TypeError(f"{type(self).__name__} takes {' or '.join(FLOAT8)}, got {text_of(x.dtype)}: quantize it")
        return replace(x.with_features(self.out_features), dtype=self.dtype)

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": (self.out_features, self.in_features)}

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        return 2.0 * x.rows * self.in_features * self.out_features

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        scales = ("input_inverse", "gradient_inverse")
        weight = Gradient(("weight",), ("input", *scales), "weight_gradient")
        if self.accumulate_into_main_grad:
            weight = Gradient(("weight",), ("input", "weight", *scales), "main_gradient", by_attributes=("weight",))
        of_weight = ("weight", "weight_scale", "weight_inverse", "gradient_inverse")
        return Gradient(("input",), of_weight, "input_gradient"), weight

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """y = x8 W8^T; raises weight_amax, where it is bound."""
        weight = call["weight"]
        raise_to_largest(call.get("weight_amax"), weight)
        w, t = quantized(weight, call["weight_scale"], self.weight_format), call["weight_inverse"]
        return in_shape_of(x, product(as_rows(x), call["input_inverse"], w.mT, t, self.dtype))

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dx = dy8 W8."""
        w = quantized(call["weight"], call["weight_scale"], self.weight_format)
        dx = product(as_rows(dy), call["gradient_inverse"], w, call["weight_inverse"], self.dtype)
        return {"input": in_shape_of(dy, dx)}

    def weight_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dW = dy8^T x8."""
        return {"weight": self._weight_product(call, dy, call["input"], self.weight_dtype)}

    def main_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """main_grad += dy8^T x8, or main_grad = dy8^T x8; gives what stands for it."""

        def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
            gradient = self._weight_product(call, dy, x, torch.float32)
            main_grad.copy_(gradient) if over else main_grad.add_(gradient)

        return {"weight": put_gradient(dy, call["input"], call["weight"], self.overwrite_main_grad, put)}

    def _weight_product(self, call: OpCall, dy: torch.Tensor, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return product(as_rows(dy).mT, call["gradient_inverse"], as_rows(x), call["input_inverse"], dtype)

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The three products, recorded by autograd: the gradient of what x8 stands for goes to x as it is."""
        given = [call[name] for name in ("weight", "input_inverse", "weight_scale", "weight_inverse")]
        exact = call["weight"].dtype == torch.float64
        form = (self.weight_format, *([torch.float64] * 2 if exact else [self.dtype, self.weight_dtype]))
        return _Products.apply(x, *given, call["gradient_inverse"], form)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}, weight={self.weight_format}"


class _Products(torch.autograd.Function):
    """y = x8 W8^T of wide numbers that 8 bits hold; its gradient comes as such numbers, too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: torch.Tensor,
        weight: torch.Tensor,
        input_inverse: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_inverse: torch.Tensor,
        gradient_inverse: torch.Tensor,
        form: tuple[torch.dtype, torch.dtype, torch.dtype],
    ) -> torch.Tensor:
        w = quantized(weight, weight_scale, form[0])
        return in_shape_of(x, product(as_rows(x), input_inverse, w.mT, weight_inverse, form[1]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        *tensors, ctx.form = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, input_inverse, weight_scale, weight_inverse, gradient_inverse = ctx.saved_tensors
        weight_format, dtype, weight_dtype = ctx.form
        (dy,) = gradients
        dx = dw = None
        if ctx.needs_input_grad[0]:
            w = quantized(weight, weight_scale, weight_format)
            dx = product(as_rows(dy), gradient_inverse, w, weight_inverse, dtype).to(x.dtype)
            dx = in_shape_of(dy, dx)
        if ctx.needs_input_grad[1]:
            dw = product(as_rows(dy).mT, gradient_inverse, as_rows(x), input_inverse, weight_dtype)
        return dx, dw, None, None, None, None, None


def quantized(x: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x * scale in 8 bits, computed in float32; in float64, where x is so."""
    return rounded(x.to(torch.promote_types(x.dtype, torch.float32)) * scale, dtype)


def product(
    a: torch.Tensor, scale_a: torch.Tensor, b: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """(a scale_a) (b scale_b) for a [m, k] and b [k, n]: multiplied in float32 and rounded once; in float64 throughout,
    where a scale is so."""
    wide = torch.promote_types(scale_a.dtype, torch.float32)
    return ((a.to(wide) * scale_a) @ (b.to(wide) * scale_b)).to(dtype)


def raise_to_largest(slot: torch.Tensor | None, x: torch.Tensor) -> None:
    """Raise a number to the largest magnitude of x; NaN is larger than all."""
    if slot is not None and x.numel():
        with torch.no_grad():
            slot.copy_(torch.maximum(slot, x.abs().amax().to(slot.dtype)))

"""Ops of another dtype: Cast; Quantize, in 8 bits times a scale; QuantizeGradient, whose values stay as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_fuser.dtypes import text_of
from te_fuser.formula import Axes, quantize, quantize_gradient
from te_fuser.formula.float8 import check_float8, once, rounded
from te_fuser.ops import op_table
from te_fuser.ops.base import NamedInput, OpCall, Spec
from te_fuser.ops.blockwise_scaling import put_scales
from te_fuser.ops.checks import check_name
from te_fuser.ops.row_op import RowOp
from te_fuser.recipe.recipes import OwnScales


class Cast(RowOp):
    """Give the same numbers in another dtype: y = x rounded to `dtype`; the gradient goes back in x's dtype.

    Raises:
        TypeError: for a dtype that is none of float32, bfloat16, float16, float64.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            raise TypeError(
                f"Cast takes a floating-point dtype such as torch.bfloat16, got {dtype!r}: float32, bfloat16, "
                "float16 or float64"
            )
        self.dtype = dtype

    def compute(self, x: Any) -> Any:
        return x

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype

    def extra_repr(self) -> str:
        return str(self.dtype)


class _Quantizer(RowOp):
    """Rounding to 8 bits of x, or of its gradient, by a named scale, a bound one, or its own."""

    def __init__(self, dtype: torch.dtype, *, scale: str | None = "scale", own: OwnScales | None = None) -> None:
        super().__init__()
        check_float8(dtype)
        self.dtype, self.scale, self.own = dtype, scale if scale is None else check_name(scale), own

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {} if self.scale is None else {"scale": NamedInput(self.scale, Axes.NONE, gradient=False)}

    def own_scale(self) -> tuple[torch.dtype, OwnScales] | None:
        return None if self.own is None else (self.dtype, self.own)

    def extra_repr(self) -> str:
        return f"{self.dtype}, scale={self.scale!r}"


class Quantize(_Quantizer):
    """Quantize to 8 bits by one scale: y = x * scale, rounded to nearest even within the range of `dtype`.

    Infinities become the largest number, NaN stays NaN. The next op divides by the scale again, and its gradient passes
    to x unchanged. Row ops do not read 8 bits: the next op has to list `dtype` in `input_dtypes`, or be the end of the
    list.

    Args:
        dtype: float8_e4m3fn or float8_e5m2.
        scale: the name of the input that scales, a tensor of one element, mostly float32; no gradient goes to it. None:
            whoever lists it binds `scale`, and maybe `amax`, float32 [], which is raised to the largest magnitude of x.
        own: how the scale follows from x itself: whoever lists it binds `scale`, `inverse` and `own_amax`, float32 [],
            which each call makes.
        takes: the only dtype of x that is accepted; by default any.

    Raises:
        TypeError: for another dtype.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    raised_in_forward: ClassVar[str] = "amax"
    measured_in_forward: ClassVar[str] = "own_amax"

    def __init__(
        self,
        dtype: torch.dtype,
        *,
        scale: str | None = "scale",
        takes: torch.dtype | None = None,
        own: OwnScales | None = None,
    ) -> None:
        super().__init__(dtype, scale=scale, own=own)
        self.takes = takes

    def infer(self, x: Spec) -> Spec:
        if self.takes is not None and x.dtype != self.takes:
            raise TypeError(
                f"takes x in {text_of(self.takes)}, as the product behind it does, got {text_of(x.dtype)}: convert one "
                "with .to()"
            )
        return super().infer(x)

    def compute(self, x: Any, scale: Any) -> Any:
        return quantize(x, scale, self.dtype)

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        if self.own is not None and call.fresh:
            put_scales(x, self.dtype, self.own, call["scale"], call["inverse"])
        return super().reference(call, x)

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.dtype


@op_table.hands_through.row(True)
@op_table.gradient_dtype.row(lambda op, dtype: op.dtype)
class QuantizeGradient(_Quantizer):
    """Return x, and quantize its gradient: dx = dy * scale, rounded to nearest even within the range of `dtype`.

    The op before divides by the scale again. dx is stored in 8 bits if that op accepts it (`takes_gradients_in`),
    otherwise as the same numbers in x's dtype.

    Args:
        dtype: float8_e4m3fn or float8_e5m2.
        scale: the name of the input that scales, a tensor of one element, mostly float32; no gradient goes to it. None:
            whoever lists it binds `scale`, and maybe `amax`, float32 [], which is raised to the largest magnitude of
            dy.
        own: how the scale follows from dy itself: whoever lists it binds `scale`, `inverse` and `own_amax`, float32 [],
            which each call makes.

    Raises:
        TypeError: for another dtype.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    raised_in_backward: ClassVar[str] = "amax"
    measured_in_backward: ClassVar[str] = "own_amax"

    def compute(self, x: Any, scale: Any) -> Any:
        return quantize_gradient(x, scale, self.dtype)

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        if self.own is None or not call.fresh:
            return super().reference(call, x)
        return _MeasureGradient.apply(x, call["scale"], call["inverse"], self.dtype, self.own)  # type: ignore[no-untyped-call]


class _MeasureGradient(torch.autograd.Function):
    """x as it is; the gradient by its own scale, which goes into numbers of the call."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, own: OwnScales
    ) -> torch.Tensor:
        ctx.numbers, ctx.how = (scale, inverse), (dtype, own)  # not saved: backward writes into them
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (dy,), (scale, inverse), (dtype, own) = gradients, ctx.numbers, ctx.how
        if torch._C._functorch.is_legacy_batchedtensor(dy) or torch._C._functorch.is_batchedtensor(dy):
            raise RuntimeError(
                "a batch of gradients needs a scale for each, and what a call made has room for one: transform the "
                "forward too, by torch.func.jacrev or vmap of model.reference"
            )
        put_scales(dy, dtype, own, scale, inverse)
        return once(rounded(dy.to(scale.dtype) * scale, dtype).to(dy.dtype)), None, None, None, None

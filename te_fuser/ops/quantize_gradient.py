"""QuantizeGradient: the gradient in 8 bits, the values as they are."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from te_fuser.formula import quantize_gradient
from te_fuser.formula.float8 import once, rounded
from te_fuser.ops import op_table
from te_fuser.ops.base import OpCall
from te_fuser.ops.own_scales import Scaling, put_scales
from te_fuser.ops.quantize import _Quantizer


@op_table.hands_through.row(True)
@op_table.gradient_dtype.row(lambda op, dtype: op.dtype)
class QuantizeGradient(_Quantizer):
    """Hand x on, and its gradient in 8 bits: dx = dy * scale rounded to nearest even within the range of `dtype`.

    Who takes dx divides by the scale again. It is stored in 8 bits where the op before this one takes gradients so
    (`takes_gradients_in`), else as such numbers in the dtype of x.

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
    """x as it is; the gradient by its own scale, which is put into numbers of the call, with its reciprocal."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, scale: torch.Tensor, inverse: torch.Tensor, dtype: torch.dtype, own: Scaling
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

"""Float8MatMul: a matrix product all three of whose products, forward and backward, are of numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.formula.float8 import check_float8
from te_fuser.ops import float8_products as products
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.checks import check_features
from te_fuser.ops.float8_products import Float8Form, raise_to_largest
from te_fuser.ops.matmul import MatMul
from te_fuser.ops.own_scales import Scaling
from te_fuser.ops.quantized_matmul import OUT_DTYPES, multiple
from te_fuser.ops.unfused_operation import UnfusedOperation
from te_fuser.params.main_grad import put_gradient


@op_table.gradient_dtype.row(lambda op, dtype: op.dtype)
class Float8MatMul(UnfusedOperation):
    """A MatMul in 8 bits: y = x8 W8^T, dx = dy8 W8, dW = dy8^T x8, each summed in float32 and rounded once.

    x comes in 8 bits as `Quantize` gives it, and dy as `QuantizeGradient` does; W in its own dtype, and is quantized
    here, forward and again in backward. What 8 bits stand for is multiplied in float32, where no library multiplies
    them. Whoever lists it binds `weight` and, in float32 []: `input_inverse` and `output_gradient_inverse`, what x8 and
    dy8 are multiplied by to be themselves again; `weight_scale` and `weight_inverse`, by which W is quantized, and the
    same of it; maybe `weight_amax`, which forward raises to the largest magnitude of W. Where W is kept in 8 bits, this
    op quantizes nothing, and takes `weight_data` [out, in] and `weight_turned` [in, out] instead of `weight_scale`.

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
        scalings: tuple[Scaling, Scaling, Scaling] | None = None,
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
        return products.output(self.form, call.__getitem__, x)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dx; raises the amax of dy, where it is bound, as the others do."""
        raise_to_largest(call.get("output_gradient_amax"), dy)
        return {"input": products.input_gradient(self.form, call.__getitem__, dy)}

    def weight_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dW."""
        raise_to_largest(call.get("output_gradient_amax"), dy)
        return {"weight": products.weight_gradient(self.form, call.__getitem__, dy, call["input"])}

    def main_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """main_grad += dW, or main_grad = dW; gives what stands for it."""

        def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
            main_grad.copy_(dy.mT @ x) if over else main_grad.add_(dy.mT @ x)

        raise_to_largest(call.get("output_gradient_amax"), dy)
        factors = products.weight_factors(self.form, call.__getitem__, dy, call["input"])
        return {"weight": put_gradient(*factors, call["weight"], self.overwrite_main_grad, put)}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The three products, recorded by autograd: the gradient of what x8 stands for goes to x as it is."""
        return products.recorded(self.form, call.__getitem__, x)

    def extra_repr(self) -> str:
        kept = [name for name, k in zip(("y", "dx", "dW"), self.form.kept, strict=True) if k]
        but = f", not in 8 bits: {', '.join(kept)}" if kept else ""
        return f"{self.in_features}, {self.out_features}, {self.dtype}{but}"


@op_table.gradient_dtype.row(None)
class PartlyFloat8MatMul(Float8MatMul):
    """Float8MatMul some of whose products are not of 8 bits: x and dy come in y's dtype, and are quantized here.

    Whoever lists it binds scales and inverses of all three tensors, and maybe `input_amax`, `weight_amax` and
    `output_gradient_amax`, which are raised to the largest magnitudes of these, whatever is quantized.

    Args:
        kept: which of y, dx and dW are products of factors as they are.
    """

    input_dtypes = ()
    takes_gradients_in = ()

    def __init__(self, matmul: MatMul, *, kept: tuple[bool, bool, bool], **given: Any) -> None:
        super().__init__(matmul, **given)
        self.form = replace(self.form, kept=kept, comes_quantized=False)


class OwnScalesMatMul(PartlyFloat8MatMul):
    """Float8MatMul whose factors get their scales from themselves, so that nothing is kept from call to call.

    x and dy come in y's dtype. Each of the three is quantized here, with its blocks along what is summed, so anew for
    another product.

    Args:
        scalings: how x, W and dy get their scales.
        keeps_weight: whether forward may keep W^T in 8 bits for backward, which else makes it again of W.
    """

    def __init__(
        self, matmul: MatMul, *, scalings: tuple[Scaling, Scaling, Scaling], keeps_weight: bool = True, **given: Any
    ) -> None:
        super().__init__(matmul, kept=(False, False, False), scalings=scalings, **given)
        self.keeps_weight = keeps_weight

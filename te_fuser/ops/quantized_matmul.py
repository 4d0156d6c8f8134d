"""QuantizedMatMul: the matrix product of numbers of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_features, check_name, feature_size
from te_fuser.ops.operations import UnfusedOperation

STEP = 16  # numbers in a row come in whole multiples
OUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@op_table.gradient_dtype.row(lambda op, dtype: op.dtype)
class QuantizedMatMul(UnfusedOperation):
    """Multiply rows in 8 bits with a matrix in 8 bits: y = (x s) (W t)^T, summed in float32 and rounded once.

    dx is the gradient of x s, dy (W t), as `Quantize` takes it; W is an input without a gradient. Where no library
    multiplies 8 bits, x s and W t are multiplied in float32.

    Args:
        in_features: the size of x's last dimension, a multiple of 16; x is [..., in_features] in float8_e4m3fn, or in
            float8_e5m2 where W is not.
        out_features: the size of y's last dimension, a multiple of 16.
        dtype: y's and its gradient's: float32, bfloat16 or float16.
        weight: the name of the input W, [out_features, in_features] in 8 bits.
        input_scale: the name of the input s, the inverse of x's scale, float32 [].
        weight_scale: the name of the input t, the same of W.
        fast_accumulation: allow sums with fewer bits than float32, where the library has a faster kernel for them.

    Raises:
        ValueError: for sizes that are no multiples of 16, and in a call for tensors of other shapes.
        TypeError: for another dtype, and in a call for tensors in others.

    Source: Micikevicius et al., "FP8 formats for deep learning" (2022).
    """

    input_dtypes = tuple(FLOAT8.values())

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: torch.dtype,
        weight: str = "weight",
        input_scale: str = "input_scale",
        weight_scale: str = "weight_scale",
        fast_accumulation: bool = True,
    ) -> None:
        super().__init__()
        self.in_features = multiple(in_features, "in_features", type(self))
        self.out_features = multiple(out_features, "out_features", type(self))
        if dtype not in OUT_DTYPES:
            raise TypeError(f"QuantizedMatMul gives {', '.join(map(text_of, OUT_DTYPES))}, got {dtype!r}")
        self.dtype, self.fast_accumulation = dtype, fast_accumulation
        self.weight, self.input_scale, self.weight_scale = map(check_name, (weight, input_scale, weight_scale))

    def named_inputs(self) -> Mapping[str, NamedInput]:
        names = ("weight", "input_scale", "weight_scale")
        return {name: NamedInput(getattr(self, name), None, gradient=False) for name in names}

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec:
        check_features(self, x, self.in_features)
        if x.dtype not in FLOAT8.values():
            raise TypeError(f"QuantizedMatMul takes {' or '.join(FLOAT8)}, got {text_of(x.dtype)}: quantize it before")
        scale = inputs.get("input_scale")
        exact = scale is not None and scale.dtype == torch.float64
        return replace(x.with_features(self.out_features), dtype=torch.float64 if exact else self.dtype)

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        for argument, given in self.named_inputs().items():
            if argument not in inputs:
                raise ValueError(f"QuantizedMatMul reads {given.name!r}: pass it")
        weight, wanted = inputs["weight"], (self.out_features, self.in_features)
        if weight.dtype not in FLOAT8.values():
            raise TypeError(f"{self.weight!r} is {text_of(weight.dtype)}, it takes {' or '.join(FLOAT8)}: quantize it")
        if weight.shape != wanted:
            raise ValueError(f"{self.weight!r} has shape {list(weight.shape)}, it needs {list(wanted)}")
        if x.dtype == weight.dtype == torch.float8_e5m2:
            raise TypeError(f"the input and {self.weight!r} are both float8_e5m2: quantize one to float8_e4m3fn")
        for argument in ("input_scale", "weight_scale"):
            scale, name = inputs[argument], getattr(self, argument)
            if scale.shape != () or scale.dtype not in (torch.float32, torch.float64):
                got = f"{text_of(scale.dtype)} {list(scale.shape)}"
                raise ValueError(f"{name!r} is one number, float32 [], got {got}")

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        return 2.0 * x.rows * self.in_features * self.out_features

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), ("weight", "weight_scale"), "input_gradient"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """y, emulated."""
        s, t = call["input_scale"], call["weight_scale"]
        return product(x, s, call["weight"], t, torch.float64 if s.dtype == torch.float64 else self.dtype)

    def input_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """dy (W t), in the dtype of dy."""
        t = call["weight_scale"]
        wide = torch.promote_types(t.dtype, torch.float32)
        return {"input": (dy.to(wide) @ (call["weight"].to(wide) * t)).to(self.dtype)}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The formula, recorded by autograd: the gradient of x s goes to x as it is."""
        s = call["input_scale"]
        wide = torch.promote_types(s.dtype, torch.float32)
        fixed, moving = x.detach().to(wide), x.to(wide)
        dequantized = fixed * s + (moving - fixed)
        exact = s.dtype == torch.float64
        one = torch.ones((), dtype=wide, device=x.device)
        return product(dequantized, one, call["weight"], call["weight_scale"], wide if exact else self.dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, {self.dtype}, weight={self.weight!r}"


def product(
    a: torch.Tensor,
    scale_a: torch.Tensor,
    b: torch.Tensor,
    scale_b: torch.Tensor,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """(a scale_a) (b scale_b)^T + bias of 8 bits, in float32, or float64 as a scale; rounded once."""
    wide = torch.promote_types(scale_a.dtype, torch.float32)
    y = (a.to(wide) * scale_a) @ (b.to(wide) * scale_b.to(wide)).mT
    return (y if bias is None else y + bias.to(wide)).to(out_dtype)


def multiple(size: int, name: str, kind: type[UnfusedOperation]) -> int:
    """A size that products of 8 bits take, a multiple of 16."""
    found = feature_size(size, name)
    if found % STEP:
        raise ValueError(f"{kind.__name__} takes {name} in multiples of {STEP}, got {found}: run this one as a MatMul")
    return found

"""Numbers of 8 bits, from the definition of the formats, and an op that reads them: for tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.ops import op_table
from te_fuser.ops.base import NamedInput, OpCall, Spec
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.recipe import OwnScales, QParams

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PLAIN, POWERS = OwnScales(QParams()), OwnScales(QParams(power_2_scale=True, amax_epsilon=0.25))
BLOCKS = OwnScales(QParams(power_2_scale=True), (1, 128))
WAYS = [(dtype, own) for dtype in (E4M3, E5M2) for own in (PLAIN, POWERS)]
FORMATS = (E4M3, E5M2)
_EXPONENT_BITS = {E4M3: 4, E5M2: 5}
# The fusions whose products run in 8 bits: without them these are emulated.
OURS = tuple(name for name in fusions.names() if name.startswith(("float8_", "partly_float8_", "own_scales_")))


def models(f: int, ffn: int) -> dict[str, Callable[[], te_fuser.Sequential]]:
    """Lists with one product, with two and a residual sum, and with a gate, of f and ffn features."""
    return {
        "linear": lambda: te_fuser.Sequential(ops.Linear(f, ffn)),
        "mlp": lambda: te_fuser.Sequential(
            te_fuser.Residual(ops.LayerNorm(f), ops.Linear(f, ffn), ops.GELU(), ops.Linear(ffn, f), ops.Dropout(0.0))
        ),
        "gated": lambda: te_fuser.Sequential(
            ops.RMSNorm(f), ops.MatMul(f, 2 * ffn), ops.SwiGLU(), ops.MatMul(ffn, f), ops.Bias(f)
        ),
    }


def numbers(dtype: torch.dtype) -> torch.Tensor:
    """The number that each of the 256 codes stands for, float64: sign, exponent, mantissa."""
    exponent_bits = _EXPONENT_BITS[dtype]
    mantissa_bits, bias = 7 - exponent_bits, 2 ** (exponent_bits - 1) - 1

    def number(code: int) -> float:
        exponent, mantissa = code >> mantissa_bits & (1 << exponent_bits) - 1, code & (1 << mantissa_bits) - 1
        sign = -1.0 if code & 0x80 else 1.0
        if dtype == E4M3 and code & 0x7F == 0x7F:
            return math.nan
        if dtype == E5M2 and exponent == 31:
            return math.nan if mantissa else sign * math.inf
        fraction = mantissa / (1 << mantissa_bits)
        return sign * (2.0 ** (exponent - bias) * (1 + fraction) if exponent else 2.0 ** (1 - bias) * fraction)

    return torch.tensor([number(code) for code in range(256)], dtype=torch.float64)


def nearest_codes(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The code of each number, uint8: the nearest finite one, of two the even one; 0x7f for NaN."""
    finite = numbers(dtype)[:128]
    finite = finite[finite.isfinite()]
    size = x.double().abs().clamp(max=finite[-1].item()).nan_to_num(nan=0.0)
    above = torch.searchsorted(finite, size).clamp(1)
    below = above - 1
    up, down = finite[above] - size, size - finite[below]
    codes = torch.where((up < down) | ((up == down) & (above % 2 == 0)), above, below)
    codes = codes + 0x80 * torch.signbit(x)
    return torch.where(x.isnan(), 0x7F, codes).to(torch.uint8)


def telling_numbers(dtype: torch.dtype) -> torch.Tensor:
    """float32 numbers at which a conversion may go wrong: those of all codes, ties, neighbours, ends, random ones."""
    own = numbers(dtype)
    own = own[own.isfinite()].sort().values
    ties = (own[1:] + own[:-1]) / 2
    edges = torch.cat([own, ties]).float()
    away = [torch.nextafter(edges, torch.tensor(end)) for end in (math.inf, -math.inf)]
    ends = torch.tensor([math.inf, math.nan, 3e38, 1e-45, 1e-38, 464.0, 465.0, 480.0, 61440.0, 65536.0, 0.0])
    rng = torch.Generator().manual_seed(0)
    scattered = torch.randn(2**15, generator=rng) * torch.exp2(torch.randint(-24, 20, (2**15,), generator=rng))
    bits = torch.randint(-(2**31), 2**31, (2**15,), generator=rng).to(torch.int32).view(torch.float32)
    return torch.cat([edges, *away, ends, -ends, scattered, bits])


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """All 2^16 numbers of a dtype of 16 bits."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)


def codes(t: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor of 8 bits."""
    return t.contiguous().view(torch.uint8)


class _Divided(torch.autograd.Function):
    """data / scale in the scale's dtype; the gradient goes to data as it is."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        wide = torch.promote_types(scale.dtype, torch.float32)
        return (data.to(wide) / scale.to(wide)).to(scale.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


@op_table.gradient_dtype.row(lambda op, dtype: torch.float32)
class Dequantized(UnfusedOperation):
    """y = x / scale in the scale's dtype, for x of 8 bits: as a product would see it, and with its gradient."""

    input_dtypes = FORMATS
    reads = ()

    def __init__(self, scale: str = "scale") -> None:
        super().__init__()
        self.scale = scale

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"scale": NamedInput(self.scale, None, gradient=False)}

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec:
        return replace(x, dtype=inputs["scale"].dtype if inputs else torch.float32)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return _divided(x, call["scale"])

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return dy.float()


_divided = _Divided.apply

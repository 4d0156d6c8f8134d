"""Weights in 8 bits, by rows and turned, each by its scale: all that a list reads, in one launch.

Products of 8 bits read a weight by rows in forward and turned for the gradient of their input; beside it the largest
magnitude is noted, which later scales follow from. The kernel's text is `quantize_weights.cu`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from te_fuser.codegen.cuda_text import CTYPES, literal
from te_fuser.codegen.description import ScaleOf
from te_fuser.codegen.written import TextKernel
from te_fuser.dtypes import text_of
from te_fuser.formula.float8 import rounded
from te_fuser.kernels import transposed8

if TYPE_CHECKING:
    from te_fuser import _native

DTYPE = torch.float8_e4m3fn
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ROWS, _TURNED, _RECORDS = 4, 8, 16  # beside these, what the native runtime is told of a weight
Quantizer = Callable[..., Any]


@dataclass(frozen=True)
class Weight8:
    """Layouts that are made of a weight.

    Attributes:
        dtype: the weight's.
        rows, turned: in which layouts.
        records: whether its amax is raised.
    """

    dtype: torch.dtype
    rows: bool = True
    turned: bool = True
    records: bool = False

    @property
    def code(self) -> int:
        """This weight as the native runtime is told of it."""
        return KINDS[self.dtype] | _ROWS * self.rows | _TURNED * self.turned | _RECORDS * self.records


def quantizer_on(
    device: torch.device, weights: Sequence[Weight8], dtype: torch.dtype = DTYPE, scale: ScaleOf | None = None
) -> Quantizer:
    """f(weight, scale, its amax where that is raised, the next weight, ...) -> what is made, as a tuple.

    Weights are [out, in] in multiples of 16, and become the bytes of `quantization.quantize`; an amax is raised to the
    largest magnitude, NaN is the largest. One tensor is given alone. On a CUDA device, by one launch; plans compile the
    kernel. By rows, matrices of any height are taken.
    """
    return functools.partial(QuantizeWeights(dtype, scale).ready(device), bytes([w.code for w in weights]))


def by_torch(weights: Sequence[Weight8], *tensors: torch.Tensor) -> Any:
    """Weights quantized by PyTorch's operations, on any device."""
    given, made = iter(tensors), []
    for weight in weights:
        wide, scale = next(given).detach().float(), next(given)
        data = rounded(wide * scale, DTYPE)
        if weight.records and (amax := next(given)) is not None and wide.numel():
            torch.maximum(amax, wide.abs().amax(), out=amax)
        made += [data] if weight.rows else []
        made += [transposed8.by_torch(data)] if weight.turned else []
    return tuple(made) if len(made) != 1 else made[0]


@dataclass(frozen=True)
class QuantizeWeights(TextKernel["_native.QuantizeWeights"]):
    """The kernel as plans compile it beside their generated ones.

    Attributes:
        dtype: which 8 bits it makes.
        scale: what it makes of each amax; it is then given four numbers for each, `codegen.description.NUMBERS`.
    """

    dtype: torch.dtype = DTYPE
    scale: ScaleOf | None = None
    name: ClassVar[str] = "quantize_weights"

    def text(self) -> str:
        """The CUDA text: what it includes, its constants, and `quantize_weights.cu`."""
        lines = [f'#include "{name}"' for name in ("te_cuda_quantize.cuh", "te_quantize_weights.h")]
        by = self.scale or ScaleOf(1.0, False, 0.0)
        lines += ["", f"using Narrow = {CTYPES[text_of(self.dtype)]};"]
        flags = {"kScales": self.scale is not None, "kPowerOfTwo": by.power_of_two}
        lines += [f"constexpr bool {name} = {str(value).lower()};" for name, value in flags.items()]
        lines += [f"constexpr float kMost = {literal(by.most)}, kEpsilon = {literal(by.epsilon)};", ""]
        return "\n".join([*lines, Path(__file__).with_suffix(".cu").read_text()])

    def native(self, cubin: bytes) -> _native.QuantizeWeights:
        """The kernel as the native runtime takes it."""
        from te_fuser import _native

        return _native.QuantizeWeights(cubin, text_of(self.dtype))

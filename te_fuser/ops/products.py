"""Matrix products of rows, by the one of PyTorch's libraries that is the faster at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

# Below so many multiplications oneDNN's longer way to its kernel costs more than the kernel gains.
_WORTH_ONEDNN = 2**21


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + b for x [rows, in], W [out, in], b [out]."""
    if x.dtype.itemsize == 2 and x.shape[0] != 1 and _in_float32(x):  # one row is a product that waits for memory
        return linear(x.float(), weight.float(), None if bias is None else bias.float()).to(x.dtype)
    if _may_choose(x) and x.numel() * weight.shape[0] >= _WORTH_ONEDNN and _suits_onednn(x, weight):
        return _onednn()(x, weight, bias, "none", [], "")  # type: ignore[misc]
    return torch.nn.functional.linear(x, weight, bias)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y = a b for a [rows, inner], b [inner, columns]."""
    if a.dtype.itemsize == 2 and _in_float32(a):
        return product(a.float(), b.float()).to(a.dtype)
    if _may_choose(a) and a.numel() * b.shape[1] >= _WORTH_ONEDNN and _suits_onednn(a, b):
        return _onednn()(a, b.t(), None, "none", [], "")  # type: ignore[misc]
    return torch.mm(a, b)


def is_torchs(rows: int, inner: int, columns: int, dtype: torch.dtype, device: torch.device) -> bool:
    """True where products of these sizes are PyTorch's own on every machine with products in `dtype`."""
    return device.type != "cpu" or dtype != torch.float32 or rows * inner * columns < _WORTH_ONEDNN


def _may_choose(x: torch.Tensor) -> bool:
    """True where there may be a choice: autograd and compilers know one way for every size."""
    return x.dtype == torch.float32 and not torch.is_grad_enabled() and not torch.compiler.is_compiling()


def _suits_onednn(*factors: torch.Tensor) -> bool:
    if _onednn() is None or not torch._C._get_mkldnn_enabled():
        return False
    return all(f.device.type == "cpu" and (f.is_contiguous() or f.t().is_contiguous()) for f in factors)


@functools.cache
def _onednn() -> Callable[..., torch.Tensor] | None:
    """oneDNN's float32 product (x, W, b) where it beats MKL's; None elsewhere.

    MKL keeps to 256-bit vectors on AMD's processors, oneDNN uses the 512-bit ones that they have: twice the speed. The
    answer depends on the processor alone, so that a program's results do not change between runs.
    """
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkl.is_available() or not _is_amd():
        return None
    try:
        pointwise = torch.ops.mkldnn._linear_pointwise.default
        a, b = (torch.arange(n * 3.0, device="cpu").reshape(n, 3) for n in (2, 4))
        with torch.no_grad():
            works = torch.equal(pointwise(a, b, None, "none", [], ""), a @ b.t())
    except (AttributeError, RuntimeError, TypeError):  # it is PyTorch's own business and may change
        return None
    return pointwise if works else None


def _is_amd() -> bool:
    try:
        return "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


# dtype -> instruction -> how many times faster than in float32 products are by it. Without any of them PyTorch's own
# loops take 5 to 150 times as long as float32's, so products are in float32, and rounded once.
_INSTRUCTIONS: Mapping[torch.dtype, Mapping[str, float]] = {
    torch.bfloat16: {"amx_bf16": 8.0, "avx512_bf16": 2.5, "sve_bf16": 2.0, "bf16": 2.0},
    torch.float16: {"amx_fp16": 8.0, "avx512_fp16": 2.0, "fp16_arith": 2.0},
}
# A PyTorch that does not name all instructions: those that it can be asked for.
_ASKED = {
    "amx_bf16": "_is_amx_tile_supported",
    "avx512_bf16": "_is_avx512_bf16_supported",
    "amx_fp16": "_is_amx_fp16_supported",
}


@functools.cache
def half_gains() -> Mapping[torch.dtype, float]:
    """bfloat16 and float16, where a CPU has products in them -> their speed over float32's."""
    named = getattr(torch.cpu, "get_capabilities", None)
    there = {name: getattr(torch.cpu, ask, bool)() for name, ask in _ASKED.items()}
    if named is not None:
        there = named()
    found = {dtype: [gain for name, gain in known.items() if there.get(name)] for dtype, known in _INSTRUCTIONS.items()}
    return {dtype: gains[0] for dtype, gains in found.items() if gains}


def _in_float32(x: torch.Tensor) -> bool:
    """True where products of such a tensor of 16-bit numbers are computed in float32."""
    return x.device.type == "cpu" and x.dtype not in half_gains()

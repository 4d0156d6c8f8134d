"""Matrix products of rows, by the one of PyTorch's libraries that is the faster at hand."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import torch

# Below so many multiplications oneDNN's longer way to its kernel costs more than the kernel gains.
_WORTH_ONEDNN = 2**21


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """y = x W^T + b for x [rows, in], W [out, in], b [out]."""
    if x.dtype == torch.float32 and x.numel() * weight.shape[0] >= _WORTH_ONEDNN and _suits_onednn(x, weight):
        return _onednn()(x, weight, bias, "none", [], "")  # type: ignore[misc]
    return torch.nn.functional.linear(x, weight, bias)


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """y = a b for a [rows, inner], b [inner, columns]."""
    if a.dtype == torch.float32 and a.numel() * b.shape[1] >= _WORTH_ONEDNN and _suits_onednn(a, b):
        return _onednn()(a, b.t(), None, "none", [], "")  # type: ignore[misc]
    return torch.mm(a, b)


def _suits_onednn(*factors: torch.Tensor) -> bool:
    if _onednn() is None or not torch._C._get_mkldnn_enabled() or torch.is_grad_enabled():
        return False  # autograd does not know this way
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

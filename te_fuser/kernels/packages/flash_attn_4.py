"""FlashAttention-4 (the package flash-attn-4, imported as `flash_attn.cute`), called below autograd.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each form of a call is compiled when it first runs, by one thread at a time and never while a
stream is captured. They run on PyTorch's current stream, read heads by any strides that are aligned, and store by them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from te_fuser.kernels.packages.optional import FirstRuns, Fit, version_of, why_changed, why_missing, why_unusable

PACKAGE = "flash-attn-4"
_OLDEST = "4.0.0b36"
FIT = Fit(PACKAGE, _OLDEST, libraries_13="nvidia-cutlass-dsl-libs-cu13")
_MODULE = "flash_attn.cute.interface"
# The package's functions below autograd, with the arguments that they are given here.
_TAKEN = {
    "_flash_attn_fwd": ("q", "k", "v", "softmax_scale", "causal", "out", "return_lse"),
    "_flash_attn_bwd": ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "dq", "dk", "dv"),
}
runs = FirstRuns(PACKAGE)


def installed_version() -> str | None:
    """The version of the package that is installed, if any."""
    return version_of(PACKAGE)


def missing() -> str | None:
    """Why there is no package to use, found without importing it; None where there is one."""
    return why_missing(PACKAGE, _OLDEST, installed_version())


@functools.cache
def unusable() -> str | None:
    """Why the package that is installed cannot be called; None when it can."""
    return why_unusable(
        PACKAGE,
        _OLDEST,
        installed_version(),
        lambda: (why_changed(_module(), name, taken) for name, taken in _TAKEN.items()),
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of q [b, S, h, D], k and v [b, S, g, D] into out, which has q's shape.

    Returns:
        The log of sums of exponentials, [b, h, S] in float32.
    """

    def call() -> torch.Tensor:
        given = {"q": q, "k": k, "v": v, "softmax_scale": scale, "causal": causal, "out": out, "return_lse": True}
        made: tuple[torch.Tensor, ...] = _module()._flash_attn_fwd(**given)
        return made[1]

    return _run("forward", (q, k, v, out), causal, call)


def backward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    logsumexp: torch.Tensor,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    *,
    causal: bool,
    scale: float,
) -> None:
    """Store the gradients of q, k and v in `gradients`, which have their shapes."""

    def call() -> None:
        given = {"q": q, "k": k, "v": v, "out": out, "dout": dout, "lse": logsumexp}
        given |= dict(zip(("dq", "dk", "dv"), gradients, strict=True))
        _module()._flash_attn_bwd(**given, softmax_scale=scale, causal=causal)

    _run("backward", (q, k, v, out, dout, *gradients), causal, call)


def _run(direction: str, tensors: tuple[torch.Tensor, ...], causal: bool, call: Callable[[], Any]) -> Any:
    """Call the package.

    Raises:
        RuntimeError: when it fails, or a form that did not run yet meets a stream that is being captured.
    """
    q = tensors[0]
    form = (direction, q.dtype, q.device, causal, *((t.shape, t.stride()) for t in tensors))
    return runs.run(q.device.index, form, call, lambda error: _failure(direction, tensors, causal, error))


def _failure(direction: str, tensors: tuple[torch.Tensor, ...], causal: bool, error: Exception) -> RuntimeError:
    q, k = tensors[:2]
    return RuntimeError(
        f"{PACKAGE}'s {direction} of attention failed for queries {list(q.shape)}, keys {list(k.shape)}, {q.dtype}, "
        f"causal={causal}: {type(error).__name__}: {error}; "
        "te_fuser.fusions.disabled('attention_cuda_flash_attn_4') plans without it"
    )


@functools.cache
def _module() -> Any:
    return importlib.import_module(_MODULE)

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
from te_fuser.kernels.packages.replay import replay_of

PACKAGE = "flash-attn-4"
_OLDEST = "4.0.0b36"
FIT = Fit(PACKAGE, _OLDEST, libraries_13="nvidia-cutlass-dsl-libs-cu13")
_MODULE = "flash_attn.cute.interface"
# The package's functions below autograd, with the arguments that they are given here.
_TAKEN = {
    "_flash_attn_fwd": ("q", "k", "v", "softmax_scale", "causal", "out", "lse", "return_lse"),
    "_flash_attn_bwd": ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "dq", "dk", "dv"),
}
# Those that have a cache of compiled functions of their own.
_COMPILED = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
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
        lambda: [
            *(why_changed(_module(), name, taken) for name, taken in _TAKEN.items()),
            *(why_changed(_module(), f"{name}.compile_cache") for name in _COMPILED),
        ],
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, *, causal: bool, scale: float
) -> torch.Tensor:
    """Attention of q [b, S, h, D], k and v [b, S, g, D] into out, which has q's shape.

    Returns:
        The log of sums of exponentials, [b, h, S] in float32.
    """
    b, length, h, _ = q.shape
    logsumexp = q.new_empty((b, h, length), dtype=torch.promote_types(q.dtype, torch.float32))

    def call(*given: torch.Tensor) -> None:
        named = dict(zip(("q", "k", "v", "out", "lse"), given, strict=True))
        _module()._flash_attn_fwd(**named, softmax_scale=scale, causal=causal, return_lse=True)

    _run("forward", call, (q, k, v, out, logsumexp), causal, scale)
    return logsumexp


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

    def call(*given: torch.Tensor) -> None:
        named = dict(zip(("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv"), given, strict=True))
        _module()._flash_attn_bwd(**named, softmax_scale=scale, causal=causal)

    _run("backward", call, (q, k, v, out, dout, logsumexp, *gradients), causal, scale)


def _run(
    direction: str, call: Callable[..., None], tensors: tuple[torch.Tensor, ...], causal: bool, scale: float
) -> None:
    """Call the package, or launch again what it launched for such tensors.

    Raises:
        RuntimeError: when it fails, or a form that did not run yet meets a stream that is being captured.
    """
    q = tensors[0]
    form = (direction, q.dtype, q.device, causal, scale, *[(t.shape, t.stride()) for t in tensors])

    def prepare() -> Callable[..., None]:
        call(*tensors)  # compiles
        return replay_of(call, tensors, [getattr(_module(), name) for name in _COMPILED])

    runs.run(q.device.index, form, prepare, tensors, lambda error: _failure(direction, tensors, causal, error))


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

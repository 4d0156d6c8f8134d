"""FlashAttention-4 (the package flash-attn-4, imported as `flash_attn.cute`), called below autograd.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each form of a call is compiled when it first runs, by one thread at a time and never while a
stream is captured. They run on PyTorch's current stream, read heads by any strides that are aligned, and store by them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.kernels.packages.optional import FirstRuns, Package, why_changed
from te_fuser.kernels.packages.replay import replay_of

PACKAGE = Package("flash-attn-4", "4.0.0b36", libraries_13="nvidia-cutlass-dsl-libs-cu13")
_MODULE = "flash_attn.cute.interface"
# The package's functions below autograd, with the arguments that they are given here.
_RAGGED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_OTHERS = (*_RAGGED, "softcap", "window_size_left", "window_size_right", "learnable_sink")
_TAKEN = {
    "_flash_attn_fwd": ("q", "k", "v", "softmax_scale", "causal", "out", "lse", "return_lse", *_OTHERS),
    "_flash_attn_bwd": ("q", "k", "v", "out", "dout", "lse", "softmax_scale", "causal", "dq", "dk", "dv", *_OTHERS),
}
# Those that have a cache of compiled functions of their own.
_COMPILED = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
_BLOCK = 64  # positions: with so few, the package compiles for a single block
runs = FirstRuns(PACKAGE.name)


@functools.cache
def unusable() -> str | None:
    """Why the package that is installed cannot be called; None when it can."""
    return PACKAGE.unusable(
        lambda: [
            *(why_changed(_module(), name, taken) for name, taken in _TAKEN.items()),
            *(why_changed(_module(), f"{name}.compile_cache") for name in _COMPILED),
        ]
    )


@dataclass(frozen=True)
class Choices:
    """What kernels do beside products; `window` is (left, right), counted from the last, None: no bound."""

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float = 0.0

    @property
    def named(self) -> dict[str, Any]:
        """As the package's functions call them."""
        found: dict[str, Any] = {"softmax_scale": self.scale, "causal": self.causal}
        if self.window != (None, None):
            found |= {"window_size_left": self.window[0], "window_size_right": self.window[1]}
        return found | ({"softcap": self.soft_cap} if self.soft_cap else {})


@dataclass(frozen=True)
class Ragged:
    """Int32 tensors, or None: where sequences [N + 1] begin among tokens, and how many positions [N] there are."""

    offsets: torch.Tensor | None = None
    key_offsets: torch.Tensor | None = None
    lengths: torch.Tensor | None = None
    key_lengths: torch.Tensor | None = None

    @property
    def named(self) -> dict[str, torch.Tensor]:
        """As the package's functions call them."""
        given = zip(_RAGGED, (self.offsets, self.key_offsets, self.lengths, self.key_lengths), strict=True)
        return {name: tensor for name, tensor in given if tensor is not None}


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    choices: Choices,
    ragged: Ragged = Ragged(),
    sink: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of q [b, S, h, D], k and v [b, S, g, D] into out, which has q's shape; of tokens [S, h, D].

    Returns:
        The log of sums of exponentials, [b, h, S] in float32; [h, S] of tokens.
    """
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    logsumexp = q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": logsumexp, **ragged.named}
    if sink is not None:
        tensors["learnable_sink"] = sink

    def call(*given: torch.Tensor) -> None:
        named = dict(zip(tensors, given, strict=True))
        _module()._flash_attn_fwd(**named, **choices.named, return_lse=True)

    _run("forward", call, tensors, choices)
    return logsumexp


def backward(
    read: Sequence[torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    choices: Choices,
    ragged: Ragged = Ragged(),
    sink: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Store the gradients of q, k and v in `gradients`, which have their shapes.

    Args:
        read: q, k, v, the output, its gradient, and what `forward` returns.

    Returns:
        The gradient of the sinks, where there are any.
    """
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    tensors = {**dict(zip(names, (*read, *gradients), strict=True)), **ragged.named}
    dsink = None if sink is None else torch.empty_like(sink)
    if sink is not None and dsink is not None:
        tensors |= {"learnable_sink": sink, "dsink": dsink}

    def call(*given: torch.Tensor) -> None:
        named = dict(zip(tensors, given, strict=True))
        to = named.pop("dsink", None)
        made = _module()._flash_attn_bwd(**named, **choices.named)
        if to is not None:
            to.copy_(made[3])

    _run("backward", call, tensors, choices)
    return dsink


def _run(direction: str, call: Callable[..., None], named: dict[str, torch.Tensor], choices: Choices) -> None:
    """Call the package, or launch again what it launched for such tensors.

    How many tokens and sequences there are is no part of a form, as the package does not compile for it: other batches
    have others, and each goes by the package.

    Raises:
        RuntimeError: when it fails, or a form that did not run yet meets a stream that is being captured.
    """
    q, tensors = named["q"], tuple(named.values())
    tokens = q.dim() == 3
    sizes = (min(-(-q.shape[0] // _BLOCK), 2), min(-(-named["k"].shape[0] // _BLOCK), 2)) if tokens else ()
    shapes = [(t.shape[1:] if tokens else t.shape, t.stride()) for t in tensors]
    form = (direction, q.dtype, q.device, choices, tuple(named), sizes, *shapes)

    def prepare() -> Callable[..., None]:
        if tokens:
            return call
        call(*tensors)  # compiles
        return replay_of(call, tensors, [getattr(_module(), name) for name in _COMPILED])

    def failure(error: Exception) -> RuntimeError:
        shapes = f"queries {list(q.shape)}, keys {list(named['k'].shape)}, {q.dtype}"
        said = f"window={choices.window}, soft_cap={choices.soft_cap}, causal={choices.causal}"
        return RuntimeError(
            f"{PACKAGE}'s {direction} of attention failed for {shapes}, {said}: {type(error).__name__}: {error}; "
            "te_fuser.fusions.disabled('attention_cuda_flash_attn_4') plans without it"
        )

    runs.run(q.device.index, form, prepare, tensors, failure)


@functools.cache
def _module() -> Any:
    return importlib.import_module(_MODULE)

"""FlashAttention-4 (the package flash-attn-4, imported as `flash_attn.cute`), called below autograd.

The package is optional, and imported when a plan on a machine with a GPU first asks for it. Its kernels are written in
CUTLASS's Python language: each form of a call is compiled when it first runs, by one thread at a time and never while a
stream is captured. They run on PyTorch's current stream, read heads by any strides that are aligned, and store by them.

A call of the package checks its arguments, looks up compiled functions by long keys and allocates, all anew each time.
So one call is watched: which compiled functions it calls with which tensors, and what it allocates. A `Replay`
allocates the same and calls the same, with other tensors of the same sizes and strides in the places of those given.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_fuser.kernels.packages.optional import PACKAGES, FirstRuns, why_changed

_ALLOCATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.Tensor.new_empty,
    torch.ops.aten.zeros.default: torch.Tensor.new_zeros,
}
_ALIASES = (torch.ops.aten.detach.default,)


class Replay:
    """A noted call as a function of its tensors: it allocates and calls what that did."""

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        made: Sequence[tuple[Callable[..., torch.Tensor], torch.Tensor]],
        calls: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]],
    ) -> None:
        tensors = [*given, *(tensor for _, tensor in made)]
        self._constants: list[Any] = []
        self._made = [(make, tuple(tensor.shape), tensor.dtype) for make, tensor in made]
        self._calls = []
        for function, arguments in calls:
            places = [self._place(argument, tensors) for argument in arguments]
            self._calls.append((function, operator.itemgetter(*places)))

    def __call__(self, *given: torch.Tensor) -> None:
        first = given[0]
        made = [make(first, shape, dtype=dtype) for make, shape, dtype in self._made]
        there = (*given, *made, *self._constants)
        for function, arguments in self._calls:
            function(*arguments(there))

    def _place(self, argument: Any, tensors: Sequence[torch.Tensor]) -> int:
        if isinstance(argument, torch.Tensor):
            form, *forms = [(t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (argument, *tensors)]
            if form not in forms:
                raise LookupError(f"a tensor {list(argument.shape)} of which nobody knows where it is from")
            return forms.index(form)
        if not _is_constant(argument):
            raise LookupError(f"{type(argument).__name__}, which may be another one in the next call")
        self._constants.append(argument)
        return len(tensors) + len(self._constants) - 1


def _is_constant(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return all(map(_is_constant, argument))
    return argument is None or isinstance(argument, (bool, int, float))


def replay_of(call: Callable[..., Any], given: Sequence[torch.Tensor], owners: Sequence[Any]) -> Callable[..., None]:
    """A replay of call(*given), or the call itself where PyTorch computes something in it, or nothing is called.

    The call works in place, and ran before; `owners` have a `compile_cache` of compiled functions.
    """
    made = _Allocations()
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
    with _watched(owners, calls), made:
        call(*given)
    if made.others or not calls:
        return call
    try:
        return Replay(given, made.found, calls)
    except LookupError:
        return call


class _Allocations(TorchDispatchMode):
    """Mode that notes and holds what is allocated, and whether PyTorch does more."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Callable[..., torch.Tensor], torch.Tensor]] = []
        self.others: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        if function in _ALLOCATIONS:
            self.found.append((_ALLOCATIONS[function], made))
        elif function not in _ALIASES:
            self.others.append(function)
        return made


class _Watched:
    """A cache of compiled functions that notes what this thread calls of it."""

    def __init__(self, cache: Any, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> None:
        self._cache, self._calls, self._thread = cache, calls, threading.get_ident()

    def __contains__(self, key: Any) -> bool:
        return key in self._cache

    def __setitem__(self, key: Any, function: Any) -> None:
        self._cache[key] = function

    def __getitem__(self, key: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = self._cache[key]
        if threading.get_ident() != self._thread:
            return function

        def noted(*arguments: Any) -> Any:
            self._calls.append((function, arguments))
            return function(*arguments)

        return noted


@contextlib.contextmanager
def _watched(owners: Sequence[Any], calls: list[tuple[Callable[..., Any], tuple[Any, ...]]]) -> Iterator[None]:
    caches = [owner.compile_cache for owner in owners]
    try:
        for owner, cache in zip(owners, caches, strict=True):
            owner.compile_cache = _Watched(cache, calls)
        yield
    finally:
        for owner, cache in zip(owners, caches, strict=True):
            owner.compile_cache = cache


PACKAGE = PACKAGES["flash-attn-4"]
_MODULE = "flash_attn.cute.interface"
# The package's functions below autograd, with the arguments that they are given here.
RAGGED = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_OTHERS = (*RAGGED, "softcap", "window_size_left", "window_size_right", "learnable_sink")
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
    """Reason for which the installed package cannot be called; None when it can."""
    return PACKAGE.unusable(
        lambda: [
            *(why_changed(_module(), name, taken) for name, taken in _TAKEN.items()),
            *(why_changed(_module(), f"{name}.compile_cache") for name in _COMPILED),
        ]
    )


@dataclass(frozen=True)
class Choices:
    """Choices beside products; `window` is (left, right), counted from the last, None: no bound."""

    scale: float
    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    soft_cap: float = 0.0

    @property
    def named(self) -> dict[str, Any]:
        """Arguments of the package's functions."""
        found: dict[str, Any] = {"softmax_scale": self.scale, "causal": self.causal}
        if self.window != (None, None):
            found |= {"window_size_left": self.window[0], "window_size_right": self.window[1]}
        return found | ({"softcap": self.soft_cap} if self.soft_cap else {})


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    choices: Choices,
    others: Mapping[str, torch.Tensor],
) -> torch.Tensor:
    """Attention of q [b, S, h, D], k and v [b, S, g, D], or of tokens [S, h, D], into out; gives logsumexp.

    `others` are the package's arguments, int32: where sequences [N + 1] begin among tokens, how many positions [N]
    there are; logits beside the scores [h] in float32.
    """
    shape = (*q.shape[:-3], q.shape[-2], q.shape[-3])
    logsumexp = q.new_empty(shape, dtype=torch.promote_types(q.dtype, torch.float32))
    tensors = {"q": q, "k": k, "v": v, "out": out, "lse": logsumexp, **others}

    def call(*given: torch.Tensor) -> None:
        named = dict(zip(tensors, given, strict=True))
        _module()._flash_attn_fwd(**named, **choices.named, return_lse=True)

    _run("forward", call, tensors, choices)
    return logsumexp


def backward(
    read: Sequence[torch.Tensor],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    choices: Choices,
    others: Mapping[str, torch.Tensor],
) -> torch.Tensor | None:
    """Store the gradients of q, k and v in `gradients`; gives that of the sinks, if any.

    `read` is q, k, v, the output, its gradient, and what `forward` gave; `others` are as there.
    """
    names = ("q", "k", "v", "out", "dout", "lse", "dq", "dk", "dv")
    tensors = {**dict(zip(names, (*read, *gradients), strict=True)), **others}
    sink = others.get("learnable_sink")
    dsink = None if sink is None else torch.empty_like(sink)
    if dsink is not None:
        tensors["dsink"] = dsink

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

"""What a package launches in a call, noted once: later calls launch it again, without what the package decides first.

A call of such a package checks its arguments, looks up compiled functions by long keys and allocates, all anew each
time. Here one call is watched: which compiled functions it calls with which tensors, and what it allocates. A replay
allocates the same and calls the same, with other tensors of the same sizes and strides in the places of those given.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_ALLOCATIONS: dict[Any, Callable[..., torch.Tensor]] = {
    torch.ops.aten.empty.memory_format: torch.Tensor.new_empty,
    torch.ops.aten.zeros.default: torch.Tensor.new_zeros,
}
_ALIASES = (torch.ops.aten.detach.default,)


class Replay:
    """A call that was noted, as a function of the tensors that it was given.

    Args:
        given: those of the call that was noted.
        made: what it allocated, and by which function.
        calls: the compiled functions, with their arguments.

    Raises:
        LookupError: when an argument is a tensor that is none of these.
    """

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

    Args:
        call: works in place on what it is given, and has run before with such tensors.
        owners: what has a `compile_cache` by which the package finds compiled functions; one thread watches at a time.
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
    """Notes what is allocated, and what else PyTorch does; it is held meanwhile, so that addresses tell it apart."""

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

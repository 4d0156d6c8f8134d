"""Looking: tensors without values that stand for those of a call, and copies of modules that take them.

They have shape, strides, dtype, device and whether they need a gradient. What is run on them runs no kernel, draws
nothing and changes no tensor of a model; asked for a value, it fails.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Look:
    """The stand-ins of one look, which may meet each other alone."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def of(self, t: torch.Tensor) -> torch.Tensor:
        """What stands for a tensor."""
        return t if isinstance(t, FakeTensor) else self._mode.from_tensor(t)

    def made(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, needs_grad: bool) -> torch.Tensor:
        """What stands for a tensor that is not there."""
        with self._mode:
            return torch.empty(tuple(shape), dtype=dtype, device=device).requires_grad_(needs_grad)

    def copied(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy on stand-ins that runs no hooks."""
        memo: dict[int, Any] = {}
        for m in module.modules():
            for there in (m._parameters, m._buffers, m.__dict__):
                memo |= {id(t): self.of(t) for t in there.values() if isinstance(t, torch.Tensor)}
        found = copy.deepcopy(module, memo)
        for m in found.modules():
            m.__dict__["_compiled_call_impl"] = m.forward  # what __call__ runs in place of hooks and forward
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function gives for stand-ins."""
        with self._mode:
            try:
                return function(*arguments)
            finally:
                _forget_cached()

    def computed(self, owner: torch.nn.Module, name: str) -> torch.Tensor:
        """What stands for a tensor of a module that is computed."""
        lists = owner._modules.get("parametrizations")
        if isinstance(lists, torch.nn.ModuleDict) and name in lists:
            return self.run(self.copied(lists[name]))  # type: ignore[no-any-return]
        return self.run(getattr, self.copied(owner), name)  # type: ignore[no-any-return]


def _forget_cached() -> None:
    """Within `torch.nn.utils.parametrize.cached()` a stand-in would be taken for what was computed."""
    cache = torch.nn.utils.parametrize._cache
    for key in [key for key, t in cache.items() if isinstance(t, FakeTensor)]:
        del cache[key]


_current: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def looking() -> Iterator[Look]:
    """The look that is under way, or a new one."""
    look = _current.get() or Look()
    token = _current.set(look)
    try:
        yield look
    finally:
        _current.reset(token)


def stands_in(t: torch.Tensor) -> bool:
    """Whether it is a stand-in, of the look that is under way."""
    return isinstance(t, FakeTensor) and _current.get() is not None

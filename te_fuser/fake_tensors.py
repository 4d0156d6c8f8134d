"""Looking: tensors without values that stand for those of a call, and copies of modules that take them.

They have shape, strides, dtype, device and whether they need a gradient. What is run on them runs no kernel, draws
nothing and changes no tensor of a model; asked for a value, it fails.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from te_fuser.contexts import being


class NotSeenError(ValueError):
    """A look came to a part of a model that only a real call can tell about."""


class Look:
    """The stand-ins of one look, which may meet each other alone."""

    def __init__(self) -> None:
        self._copies: list[dict[int, Any]] = []

    @cached_property
    def _mode(self) -> FakeTensorMode:
        return FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def of(self, given: Any) -> Any:
        """Stand-in for a tensor, or for each in a structure of them."""
        return tree_map_only(torch.Tensor, self._of, given)

    def _of(self, t: torch.Tensor) -> torch.Tensor:
        return t if isinstance(t, FakeTensor) else self._mode.from_tensor(t)

    def made(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, needs_grad: bool) -> torch.Tensor:
        """Stand-in for a tensor that was made, which operations may write: no leaf."""
        with self._mode, torch.set_grad_enabled(needs_grad):
            leaf = torch.empty(tuple(shape), dtype=dtype, device=device).requires_grad_(needs_grad)
            # A node of autograd asks its device for streams: PyTorch aborts where that device is named alone.
            there = device.type != "cuda" or torch.cuda.is_available()
            return leaf.clone() if there else leaf

    def copied(self, module: torch.nn.Module) -> torch.nn.Module:
        """A copy on stand-ins that runs no hooks."""
        generators = [g for m in module.modules() for g in vars(m).values() if isinstance(g, torch.Generator)]
        memo: dict[int, Any] = {id(g): g for g in generators}
        self._copies.append(memo)  # of owners, too, which the ops bound to them hold weakly
        with _CopiesWithoutValues(self):
            found = copy.deepcopy(module, memo)
        for m in found.modules():
            m.__dict__["_compiled_call_impl"] = m.forward  # what __call__ runs in place of hooks and forward
        return found

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function on stand-ins and return its result."""
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # a later call would take a stand-in for the cast of a weight
        # Whoever has hooks for saved tensors, as checkpointing has, must not see what is saved here.
        with saved_tensors_hooks(_as_it_is, _as_it_is), self._mode:
            try:
                return function(*arguments)
            finally:
                torch.set_autocast_cache_enabled(caches)
                # Within `parametrize.cached()` a stand-in would be taken for what was computed.
                cache = torch.nn.utils.parametrize._cache
                for key in [key for key, t in cache.items() if isinstance(t, FakeTensor)]:
                    del cache[key]

    def computed(self, owner: torch.nn.Module, name: str) -> torch.Tensor:
        """Stand-in for a tensor of a module that is computed."""
        maker = maker_of(owner, name)
        if maker is not owner:
            return self.run(self.copied(maker))  # type: ignore[no-any-return]
        return self.run(getattr, self.copied(owner), name)  # type: ignore[no-any-return]


def maker_of(owner: torch.nn.Module, name: str) -> torch.nn.Module:
    """Module that computes a tensor of another: its parametrization, or itself."""
    lists = owner._modules.get("parametrizations")
    return lists[name] if isinstance(lists, torch.nn.ModuleDict) and name in lists else owner


class _CopiesWithoutValues(TorchFunctionMode):
    """Mode in which a copy of a tensor is its stand-in."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.__deepcopy__, torch.Tensor.clone):
            return self._look.of(args[0])
        return func(*args, **(kwargs or {}))


def _as_it_is(t: torch.Tensor) -> torch.Tensor:
    return t


_current: ContextVar[Look | None] = ContextVar("look", default=None)


def looking() -> AbstractContextManager[Look]:
    """The look that is under way, or a new one."""
    return being(_current, _current.get() or Look())


def is_looking() -> bool:
    """True while a look is under way."""
    return _current.get() is not None


def stands_in(t: torch.Tensor) -> bool:
    """True for a stand-in, of the look that is under way."""
    return isinstance(t, FakeTensor) and _current.get() is not None


# ------------------------------------------------------------------------------------------ what was seen in a call

Form = tuple[Sequence[int], torch.dtype, torch.device, bool]


class LastCall:
    """Record of a module's last call: the forms of its inputs and results."""

    def __init__(self) -> None:
        self._known: tuple[Any, Sequence[Form], Any] | None = None

    def note(self, module: torch.nn.Module, given: Sequence[Any], asked: Sequence[str], made: Sequence[Any]) -> None:
        """Write a call down, unless it is like the last, with what was asked for by name."""
        if not all(isinstance(t, torch.Tensor) for t in (*given, *made)):
            self._known = None
            return
        like, gave, known = _like(given, asked), [tensor_form(t) for t in made], self._known
        if known is None or known[0] != like or known[1] != gave:
            self._known = like, gave, _state(module)

    def gave(self, module: torch.nn.Module, given: Sequence[Any], asked: Sequence[str]) -> Sequence[Form] | None:
        """Forms of the last call's results, if it was like this one."""
        known = self._known
        if known is None or not all(isinstance(t, torch.Tensor) for t in given):
            return None
        return known[1] if known[0] == _like(given, asked) and known[2] == _state(module) else None


def tensor_form(t: torch.Tensor) -> Form:
    """Shape, dtype and device of a tensor, and whether it needs a gradient."""
    return t.shape, t.dtype, t.device, t.requires_grad


def _like(given: Sequence[torch.Tensor], asked: Sequence[str]) -> Any:
    autocast = [torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in ("cpu", "cuda")]
    return [tensor_form(t) for t in given], list(asked), torch.is_grad_enabled(), autocast


def _state(module: torch.nn.Module) -> Any:
    """State of a module that the form of its results may depend on, too."""
    modules = [(weakref.ref(m), m.training) for m in module.modules()]
    return modules, [(p.dtype, p.device, p.requires_grad) for p in module.parameters()]

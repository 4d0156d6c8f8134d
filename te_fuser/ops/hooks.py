"""Hooks of modules, and of the ops that another op is lowered to."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_fuser.guards import Facts
from te_fuser.ops.base import FusableOperation

_module = torch.nn.modules.module
# Those that run for all modules: while there is one, every op runs by its own __call__.
GLOBAL_HOOKS: tuple[dict[int, Any], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)


def hooks_of(m: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The hooks that a module's own __call__ would run, by kind."""
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def _is_users(hook: Any) -> bool:
    """True for any hook but PyTorch's own, without which a module may not run."""
    named = getattr(getattr(hook, "func", hook), "__module__", None) or ""  # of a functools.partial its function
    return named.partition(".")[0] != "torch"


def has_users_hooks(module: torch.nn.Module) -> bool:
    """True where a module or one in it has a hook that is none of PyTorch's."""
    return any(_is_users(hook) for m in module.modules() for hooks in hooks_of(m) for hook in hooks.values())


@contextmanager
def silenced(module: torch.nn.Module) -> Iterator[None]:
    """Silence hooks in a module and for all modules, in this thread, but PyTorch's own."""
    here = threading.get_ident()

    def quiet(hook: Any) -> Any:
        return lambda *args, **kwargs: None if threading.get_ident() == here else hook(*args, **kwargs)

    kinds = [*GLOBAL_HOOKS, *(hooks for m in module.modules() for hooks in hooks_of(m))]
    loud = [(hooks, {key: hook for key, hook in hooks.items() if _is_users(hook)}) for hooks in kinds]
    for hooks, found in loud:
        hooks.update({key: quiet(hook) for key, hook in found.items()})
    try:
        yield
    finally:
        for hooks, found in loud:
            hooks.update({key: hook for key, hook in found.items() if key in hooks})


def modules_as_they_are(layer: torch.nn.Module) -> Facts:
    """Facts that modules in a layer are the same, of the same class, hooks and forward."""
    modules = list(layer.modules())
    inner = modules[1:]
    hooks = [h for m in inner for h in hooks_of(m)]
    watched: list[dict[Any, Any]] = [*(m._modules for m in modules), *(h for h in hooks if h)]
    return Facts(
        members=tuple([(d, tuple(d.values())) for d in watched]),
        empty=tuple([h for h in hooks if not h]),
        items=tuple([(vars(m), "forward", vars(m).get("forward")) for m in inner]),
        calls=tuple([(functools.partial(type, m), type(m)) for m in inner]),
    )


def hook_facts(hooks: Iterable[dict[int, Any]]) -> Facts:
    """Facts that hold while there are hooks of the same kinds as now."""
    kinds = tuple(hooks)
    return Facts(empty=tuple([kind for kind in kinds if not kind]), filled=tuple([kind for kind in kinds if kind]))


def facts_of_parts(whole: FusableOperation) -> Facts:
    """Facts that an op's parts are these, with these attributes and hooks."""
    parts = tuple(whole._modules.values())
    ops = [part for part in parts if isinstance(part, FusableOperation)]
    hooks = hook_facts(kind for op in ops for kind in hooks_of(op))
    return Facts.of([Facts(members=((whole._modules, parts),)), hooks, *[op.facts() for op in ops]])


def refuse_hooks(whole: FusableOperation, name: str, part: FusableOperation) -> None:
    """Refuse hooks of an op that another one is lowered to."""
    if any(hooks_of(part)):
        raise TypeError(
            f"{type(whole).__name__}: part {name!r} has a hook, which would not run: hook the whole operation, "
            "or write the parts into the list"
        )

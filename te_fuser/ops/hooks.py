"""Hooks of modules, and of the ops that another op is lowered to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from te_fuser.ops.base import FusableOperation

_module = torch.nn.modules.module
# Those that run for all modules: while there is one, every op runs by its own __call__.
GLOBAL_HOOKS: tuple[Mapping[int, Any], ...] = (
    _module._global_forward_hooks,
    _module._global_forward_pre_hooks,
    _module._global_backward_hooks,
    _module._global_backward_pre_hooks,
)


def hooks_of(m: torch.nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The hooks that a module's own __call__ would run, by kind."""
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


def revision_of(part: FusableOperation) -> tuple[Any, ...]:
    """What changes when an attribute or the hooks of an op do that another one is lowered to."""
    return part.revision, *map(len, hooks_of(part))


def refuse_hooks(whole: FusableOperation, name: str, part: FusableOperation) -> None:
    """Refuse hooks of an op that another one is lowered to.

    Raises:
        TypeError: when it has one.
    """
    if any(hooks_of(part)):
        raise TypeError(
            f"{type(whole).__name__}: part {name!r} has a hook, which would not run: hook the whole operation, "
            "or write the parts into the list"
        )

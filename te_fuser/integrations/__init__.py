"""Modules for other tools, imported when asked for; here: how a list takes the place of a module's forward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from te_fuser.convert.layer_ops import LayerParts
from te_fuser.guards import Facts, still_hold
from te_fuser.ops.hooks import modules_as_they_are
from te_fuser.sequential import Sequential

Members = Callable[[LayerParts], list[nn.Module]]


class OwnForward(nn.Module):
    """The forward of a module's class, as a member of the list that stands for the module."""

    by_itself = "its weight or bias is no parameter"

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.__dict__["_run"] = functools.partial(type(module).forward, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.__dict__["_run"](x)  # type: ignore[no-any-return]


class KeptLists(dict[Members, tuple[Facts, Sequential]]):
    """Lists of one module, with facts about its parts; copies and pickles make their own."""

    def __reduce__(self) -> Any:
        return KeptLists, ()


def run_list(module: nn.Module, members: Members, x: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """y of x by a list of these members, kept until one of the parts is another."""
    if torch.compiler.is_compiling():
        from te_fuser.fuser.run.dynamo_break import outside_tracing

        return outside_tracing(functools.partial(_run_list, module, members, x, inputs))  # type: ignore[no-any-return]
    return _run_list(module, members, x, inputs)


def _run_list(module: nn.Module, members: Members, x: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    kept = module.__dict__.setdefault("_te_fuser_lists", KeptLists())
    facts, found = kept.get(members, (None, None))
    if found is None or not still_hold(facts):
        parts = LayerParts(module)
        found = Sequential(*members(parts))
        kept[members] = Facts.of([modules_as_they_are(module), parts.facts()]), found
    return found(x, **inputs)  # type: ignore[no-any-return]

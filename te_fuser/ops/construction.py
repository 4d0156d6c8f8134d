"""Construction of ops: their parameters, ops made like another one, products in the order in which all were made.

That order is the same in all processes that run one program, whatever runs where.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import torch

from te_fuser.ops.base import FusableOperation
from te_fuser.ops.checks import check_parameters_dtype

_made: WeakValueDictionary[int, FusableOperation] = WeakValueDictionary()
_count = itertools.count(1)
_last = [0]
_watching: list[Callable[[FusableOperation], None]] = []


def constructed(op: FusableOperation) -> None:
    """Note an op that was just made, or copied from another one."""
    number = next(_count)
    _made[number] = op
    _last[0] = number
    for look in _watching:
        look(op)


def on_construction(look: Callable[[FusableOperation], None]) -> None:
    """Have a function called with each from now on."""
    _watching.append(look)


def latest() -> int:
    """The number of the last one."""
    return _last[0]


def in_order() -> list[FusableOperation]:
    """The ops that are still there."""
    return list(_made.values())


Op = TypeVar("Op", bound=torch.nn.Module)


def empty(*shape: int, dtype: torch.dtype | None, device: torch.device | str | None) -> torch.nn.Parameter:
    """A parameter that `reset_parameters` is to fill, in a floating-point dtype."""
    check_parameters_dtype("dtype", dtype)
    return torch.nn.Parameter(torch.empty(shape, dtype=dtype, device=device))


def fill(parameter: torch.nn.Parameter | None, number: float) -> None:
    """Set every element of a parameter that is there."""
    if parameter is not None:
        torch.nn.init.constant_(parameter, number)


def alike(op: Op, features: int, **changed: Any) -> Op:
    """An op of the same kind and attributes for so many features."""
    given: dict[str, Any] = {}
    for name, argument in inspect.signature(type(op)).parameters.items():
        value = getattr(op, name, argument.empty)
        if name in ("features", "in_features"):
            given[name] = features
        elif name == "device":
            given[name] = "meta"
        elif isinstance(argument.default, bool) and isinstance(value, (torch.Tensor, type(None))):
            given[name] = value is not None
        elif not (value is argument.empty or callable(value) or isinstance(value, torch.Tensor)):
            given[name] = value
        elif argument.default is argument.empty and name not in changed:
            raise NotImplementedError(f"{type(op).__name__} keeps no attribute {name!r} of its constructor's argument")
    return type(op)(**{**given, **changed})

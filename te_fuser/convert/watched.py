"""Facts about what a layer's lists were made from, which each call checks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from te_fuser.facts import Facts
from te_fuser.ops.hooks import hooks_of

_SCALARS = (bool, int, float, str, type(None))


def modules_as_they_are(layer: nn.Module) -> Facts:
    """The modules in a layer: which they are, of which class, with which hooks, and no forward that was put there."""
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


def scalars_of(modules: Iterable[nn.Module]) -> Facts:
    """All numbers, flags and names that modules have as attributes."""
    own = [vars(m) for m in modules]
    return Facts(
        items=tuple([(d, name, value) for d in own for name, value in d.items() if isinstance(value, _SCALARS)]),
        calls=tuple([(d.__len__, len(d)) for d in own]),
    )


def answers(*asked: Callable[[], Any]) -> Facts:
    """Facts that functions still give the answers that they give now."""
    return Facts(calls=tuple([(ask, ask()) for ask in asked]))

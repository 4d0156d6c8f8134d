"""Products in the order of their construction: the same in all processes that run one program, whatever runs where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from weakref import WeakValueDictionary

from te_fuser.ops.base import FusableOperation

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

"""Products in the order of their construction: the same in all processes that run one program, whatever runs where."""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

from te_fuser.ops.base import FusableOperation

_made: WeakValueDictionary[int, FusableOperation] = WeakValueDictionary()
_count = itertools.count(1)
_last = [0]


def constructed(op: FusableOperation) -> None:
    """Note an op that was just made, or copied from another one."""
    number = next(_count)
    _made[number] = op
    _last[0] = number


def latest() -> int:
    """The number of the last one."""
    return _last[0]


def in_order() -> list[FusableOperation]:
    """The ops that are still there."""
    return list(_made.values())

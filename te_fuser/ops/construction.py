"""Products in the order of their construction: the same in all processes that run one program, whatever runs where."""

from __future__ import annotations

import itertools
from weakref import WeakValueDictionary

from te_fuser.ops.base import FusableOperation

_made: WeakValueDictionary[int, FusableOperation] = WeakValueDictionary()
_count = itertools.count()


def constructed(op: FusableOperation) -> None:
    """Note an op that was just made, or copied from another one."""
    _made[next(_count)] = op


def in_order() -> list[FusableOperation]:
    """The ops that are still there."""
    return list(_made.values())

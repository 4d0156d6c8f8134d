"""Placement: what each rank of a group has of a value, and what is known of that where a part of a list begins."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_fuser.distributed.group import Group


class Placement:
    """Part of a value that each rank of a group has; its gradient has the same placement unless stated otherwise."""

    outer: bool = False

    @property
    def by_rows(self) -> bool:
        """True where each rank has its part of the rows."""
        return False


@dataclass(frozen=True)
class Replicated(Placement):
    """Placement of a value that all ranks have.

    Attributes:
        gathered: True if later ops differ between ranks, so that its gradient is `Partial`.
    """

    gathered: bool = False

    def __str__(self) -> str:
        return "whole, and gone on with in each rank's own way" if self.gathered else "whole"


@dataclass(frozen=True)
class Shard(Placement):
    """Placement of a value of which each rank has a part along a dimension.

    Attributes:
        dim: -1 for the features; any other dimension is one of the rows.
        outer: sharded for the whole list, before another group shards each part further (context parallelism).
        balanced: each rank has two blocks of it, as by `cut_sequence(balanced=True)`.
    """

    dim: int
    outer: bool = False
    balanced: bool = False

    @property
    def by_rows(self) -> bool:
        return self.dim != -1

    def __str__(self) -> str:
        if self.outer:
            blocks = "in two blocks for each rank" if self.balanced else "in a block for each rank"
            return f"cut by sequences along dimension {self.dim}, {blocks}"
        return f"cut by rows along dimension {self.dim}" if self.by_rows else "cut by features"


@dataclass(frozen=True)
class Partial(Placement):
    """Placement of a sum: each rank has a term of it; its gradient is replicated."""

    def __str__(self) -> str:
        return "a term of a sum over the ranks"


@dataclass(frozen=True)
class Entry:
    """Placements where a part of a list begins: of x, of the list's, of named ones."""

    x: Placement
    start: Placement
    named: Mapping[str, Placement] = field(default_factory=dict)


Entering = Mapping[Group, Entry]


class _CurrentModule(threading.local):
    module: Any = None
    entering: Entering = {}


CALL = _CurrentModule()  # the module that a list calls, and what enters it there


@contextlib.contextmanager
def entering(module: Any, known: Entering) -> Iterator[None]:
    """Context in which calls of this module are told what enters it."""
    before = CALL.module, CALL.entering
    CALL.module, CALL.entering = module, known
    try:
        yield
    finally:
        CALL.module, CALL.entering = before


def entering_now(module: Any) -> Entering:
    """Placements that enter a module in the list that calls it; none where no list does."""
    return CALL.entering if CALL.module is module else {}

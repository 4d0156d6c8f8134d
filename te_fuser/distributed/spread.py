"""Spread: what each rank of a group has of a value, and what an op is told of it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from te_fuser.distributed.group import Group


@dataclass(frozen=True)
class Spread:
    """What each rank of a group has of a value; of its gradient the same where nothing else is said.

    Attributes:
        words: how messages say it; it tells the kinds apart.
        dim: of rows, the dimension along which they are cut.
        outer: whether they are cut for the whole list, before other ranks cut what is left of them.
        balanced: see `Context`.
    """

    words: str
    dim: int | None = None
    outer: bool = False
    balanced: bool = False

    @property
    def by_rows(self) -> bool:
        """Whether each rank has its part of the rows."""
        return self.dim is not None

    def __str__(self) -> str:
        return self.words


WHOLE = Spread("whole")  # all have the same
FEATURES = Spread("cut by features")  # each has its part of every row
PARTIAL = Spread("a term of a sum over the ranks")  # whose gradient is whole
GATHERED = Spread("whole, and gone on with in each rank's own way")  # whose gradient is a term of a sum


def rows(dim: int) -> Spread:
    """Each rank has its part of the rows, along a dimension."""
    return Spread(f"cut by rows along dimension {dim}", dim)


def context_rows(dim: int, balanced: bool) -> Spread:
    """Each rank has its part of the sequences, which attention alone sees whole."""
    blocks = "in two blocks for each rank" if balanced else "in a block for each rank"
    return Spread(f"cut by sequences along dimension {dim}, {blocks}", dim, True, balanced)


@dataclass(frozen=True)
class Told:
    """What an op is told beside the spread of its main input.

    Attributes:
        group: the ranks.
        start: the spread of the list's input, which that of the call's other tensors is too.
        named: by argument, those of the named inputs that ops of the list have made.
        shapes: of its parameters, as this rank has them.
    """

    group: Group
    start: Spread = WHOLE
    named: Mapping[str, Spread] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Entered:
    """What each rank has where a part of a list begins.

    Attributes:
        x: of what enters it.
        start: of the input of the whole list.
        named: by name, of what ops before it have named.
    """

    x: Spread
    start: Spread
    named: Mapping[str, Spread] = field(default_factory=dict)


Entering = Mapping[Group, Entered]


class _Call(threading.local):
    module: Any = None
    entering: Entering = {}


CALL = _Call()  # the module that a list calls, and what enters it there


@contextlib.contextmanager
def entering(module: Any, known: Entering) -> Iterator[None]:
    """In here a call of this module, an op or a list, is told what enters it; others in there are not."""
    before = CALL.module, CALL.entering
    CALL.module, CALL.entering = module, known
    try:
        yield
    finally:
        CALL.module, CALL.entering = before


def entering_now(module: Any) -> Entering:
    """What enters a module in the list that calls it; nothing is known where none does."""
    return CALL.entering if CALL.module is module else {}

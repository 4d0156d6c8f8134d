"""Scales between two updates, for what computes a forward again, and those that a CUDA graph copies."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from te_fuser.quantization.state import Numbers, State, blocks, lock


class Kept(NamedTuple):
    """The scales of a product between two folds.

    Attributes:
        state: of the product.
        scales, inverses: what it had by role.
        entries: the numbers of the regions that it was called in last, `entry` and `ran_in`.
    """

    state: weakref.ref[State]
    scales: Numbers
    inverses: Numbers
    entries: frozenset[int]

    @classmethod
    def of(cls, state: State) -> Kept:
        """Those of now."""
        entries = frozenset((state.entry, state.ran_in))
        return cls(weakref.ref(state), {**state.scales}, {**state.inverses}, entries)


class Snapshot:
    """The scales between two folds, for what computes a forward again.

    Attributes:
        scales: of each product; None while they are what it has.
        is_captured: whether they are copies that a CUDA graph makes.
    """

    scales: list[Kept] | None = None
    is_captured = False


_snapshot: list[Any] = [lambda: None]  # a weak reference to that of now, where somebody keeps one
_captured: ContextVar[Snapshot | None] = ContextVar("te_fuser_captured_scales", default=None)


def read_in_capture() -> Snapshot | None:
    """The copies of scales that calls here read, which a CUDA graph makes at each replay; None where none does."""
    return _captured.get()


@contextlib.contextmanager
def of_capture(scales: Snapshot) -> Iterator[None]:
    """In here they are these."""
    token = _captured.set(scales)
    try:
        yield
    finally:
        _captured.reset(token)


def snapshot() -> Snapshot:
    """The scales of now."""
    captured = _captured.get()
    if captured is not None:
        return captured
    with lock:
        found: Snapshot | None = _snapshot[0]()
        if found is None:
            found = Snapshot()
            _snapshot[0] = weakref.ref(found)
        return found


def keep_snapshot() -> None:
    """Leave the scales, which are about to change, to who asked for those of now."""
    kept: Snapshot | None = _snapshot[0]()
    if kept is not None:
        kept.scales = [Kept.of(state) for block in blocks() for state in block.states()]
    _snapshot[0] = lambda: None

"""Passes by name: each takes a list or a plan and gives another; what each changed is recorded where somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from torch.compiler import is_dynamo_compiling

Found = TypeVar("Found")
Given = TypeVar("Given")
Items = Callable[[Any], Iterable[tuple[str, object]]]


@dataclass(frozen=True)
class PassRecord:
    """One pass over a call's list of ops or over its plan.

    Attributes:
        name: that of the pass.
        over: "ops" or "steps".
        before, after: the entries, each as (text, the entry).
    """

    name: str
    over: str
    before: tuple[tuple[str, object], ...]
    after: tuple[tuple[str, object], ...]

    @property
    def removed(self) -> list[str]:
        """Entries that were there before alone."""
        return _beyond(self.before, self.after)

    @property
    def added(self) -> list[str]:
        """Entries that are there afterwards alone."""
        return _beyond(self.after, self.before)

    @property
    def changed(self) -> list[str]:
        """Entries that read as before and are others: in time, in what they keep, in what they write over."""
        there = {id(entry) for _, entry in self.before}
        same = Counter(text for text, entry in self.after if id(entry) not in there)
        return [*(same - Counter(self.added)).elements()]

    @property
    def moved(self) -> bool:
        """True where what stays stands in another order."""
        stays = Counter(text for text, _ in self.before) & Counter(text for text, _ in self.after)
        return _in_order(self.before, stays) != _in_order(self.after, stays)


def _beyond(entries: tuple[tuple[str, object], ...], others: tuple[tuple[str, object], ...]) -> list[str]:
    return _in_order(entries, Counter(text for text, _ in entries) - Counter(text for text, _ in others))


def _in_order(entries: tuple[tuple[str, object], ...], wanted: Counter[str]) -> list[str]:
    left, found = wanted.copy(), []
    for text, _ in entries:
        if left[text] > 0:
            left[text] -= 1
            found.append(text)
    return found


_records: ContextVar[list[PassRecord] | None] = ContextVar("pass records", default=None)


@contextmanager
def record_passes() -> Iterator[list[PassRecord]]:
    """Record the passes that run in here, in their order."""
    records: list[PassRecord] = []
    token = _records.set(records)
    try:
        yield records
    finally:
        _records.reset(token)


def run_passes(
    passes: Mapping[str, Callable[[Found, Given], Found]],
    found: Found,
    given: Given,
    over: str,
    items: Items,
    start: str = "",
) -> Found:
    """Run passes one after the other.

    Args:
        passes: name -> pass.
        given: what each takes beside the list or plan that it changes.
        over: "ops" or "steps".
        items: f(list or plan) -> its entries, as (text, entry).
        start: the name of what there is to begin with, where no pass made that.
    """
    records = None if is_dynamo_compiling() else _records.get()  # which Dynamo cannot read
    before = () if records is None else tuple(items(found))
    if start and records is not None:
        records.append(PassRecord(start, over, (), before))
    for name, run in passes.items():
        found = run(found, given)
        if records is not None:
            after = tuple(items(found))
            records.append(PassRecord(name, over, before, after))
            before = after
    return found

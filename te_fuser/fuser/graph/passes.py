"""Passes by name, each from a list or a plan to another, and the contexts around a call that bring some of their own.

What each pass changed is recorded where somebody asks. Contexts, as regions of recipes are, register themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_dynamo_compiling

from te_fuser.contexts import being
from te_fuser.formula.evaluate import rounds
from te_fuser.guards import Facts

if TYPE_CHECKING:
    from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp


Found = TypeVar("Found")
Given = TypeVar("Given")
Items = Callable[[Any], Iterable[tuple[str, object]]]


@dataclass(frozen=True)
class PassRecord:
    """One pass over a call's "ops" or over the "steps" of its plan; entries are (text, the entry)."""

    name: str
    over: str
    before: tuple[tuple[str, object], ...]
    after: tuple[tuple[str, object], ...]

    @property
    def removed(self) -> list[str]:
        return _beyond(self.before, self.after)

    @property
    def added(self) -> list[str]:
        return _beyond(self.after, self.before)

    @property
    def changed(self) -> list[str]:
        """Entries that read as before and are others, say in time or in what they keep."""
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


def record_passes() -> AbstractContextManager[list[PassRecord]]:
    """Record the passes that run in here, in their order."""
    return being(_records, list[PassRecord]())


def run_passes(
    passes: Mapping[str, Callable[[Found, Given], Found]],
    found: Found,
    given: Given,
    over: str,
    items: Items,
    start: str = "",
) -> Found:
    """Run passes by name one after the other; each takes `given`, too.

    Args:
        items: f(list or plan) -> its entries, as (text, entry), for the record.
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


Keys = tuple[Hashable, ...]  # one of each context; empty where nothing surrounds a call


class ReadyList(NamedTuple):
    """A list that is ready for a call; its bindings may be the `aside` of its context."""

    listed: Sequence[ListedOp]
    lasts: bool = True  # later calls may run the list, too
    facts: Callable[[], Facts] = Facts  # conditions under which it stays ready


class CallContext:
    """One kind of context that calls may be in; its key, on which plans depend, is None outside."""

    key: Callable[[], Hashable]

    def prepare(self, listed: Sequence[ListedOp], key: Any, reads: bool) -> ReadyList:
        """Make a list ready, in each call of it that is not known to be like the last one.

        Args:
            listed: the ops, as a call outside has them, or as an earlier `prepare` gave them for this key.
            reads: whether it is for a reference, which leaves nothing behind.
        """
        raise NotImplementedError

    def rewrite(self, listed: Sequence[ListedOp], call: CallSpecs, key: Any) -> Sequence[ListedOp]:
        """The list as it runs in a call; `call.notes` takes lines for the plan."""
        raise NotImplementedError


_known: list[CallContext] = []


def register(context: CallContext) -> None:
    """Have calls ask for such a context from now on."""
    _known.append(context)


def keys_now(dtype: torch.dtype) -> Keys:
    """The keys of what surrounds a call of an x of that dtype now.

    Calls in float64 are surrounded by nothing, but references that are to be exact are (`unrounded`).
    """
    if not torch.compiler.is_dynamo_compiling() and dtype == torch.float64 and rounds():
        return ()
    found = tuple([context.key() for context in _known])
    return found if any(key is not None for key in found) else ()


def prepared(listed: Sequence[ListedOp], keys: Keys, reads: bool = False) -> ReadyList:
    """A list made ready for a call with these keys; the facts say that later calls have the same."""
    made: list[ReadyList] = []
    for context, key in zip(_known, keys or itertools.repeat(None), strict=False):
        made.append(context.prepare(listed, key, reads))
        listed = made[-1].listed

    def facts() -> Facts:
        calls = zip([context.key for context in _known], keys or itertools.repeat(None), strict=False)
        return Facts.of([Facts(calls=tuple(calls)), *[ready.facts() for ready in made]])

    return ReadyList(listed, all(ready.lasts for ready in made), facts)


def rewrites(call: CallSpecs) -> dict[str, Callable[[Sequence[ListedOp], CallSpecs], Sequence[ListedOp]]]:
    """The passes of what surrounds a call, by the names of its contexts."""
    around = [(c, key) for c, key in zip(_known, call.around, strict=False) if key is not None]
    return {type(c).__name__: functools.partial(c.rewrite, key=key) for c, key in around}

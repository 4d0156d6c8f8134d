"""Contexts that may surround a call and change its list, as regions of recipes do: registered, so nobody names them."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser.facts import Facts
from te_fuser.formula.rows import rounds

if TYPE_CHECKING:
    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp

Keys = tuple[Hashable, ...]  # one of each context; empty where nothing surrounds a call


class ReadyList(NamedTuple):
    """A list that is ready for a call.

    Attributes:
        listed: the ops, with bindings that `CallContext.rewrite` may take as `aside` of theirs.
        lasts: whether later calls may run the list, too.
        facts: gives the conditions under which it stays ready.
    """

    listed: Sequence[ListedOp]
    lasts: bool = True
    facts: Callable[[], Facts] = Facts


class CallContext:
    """One kind of context that calls may be in.

    Attributes:
        key: what plans depend on now; None outside. It raises where a compiler traces what it cannot follow.
    """

    key: Callable[[], Hashable]

    def prepare(self, listed: Sequence[ListedOp], key: Any, reads: bool) -> ReadyList:
        """Make a list ready, in each call of it that is not known to be like the last one.

        Args:
            listed: the ops, as a call outside has them, or as an earlier `prepare` gave them for this key.
            key: None: the call is outside.
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

"""What may surround a call and change its list, as regions of recipes do: registered, so that nobody names it here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.facts import Facts
from te_fuser.formula.rows import rounds

if TYPE_CHECKING:
    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp


class Surrounding:
    """One kind of surroundings; `key()` says what plans depend on now, None where there is none."""

    key: Callable[[], Hashable]

    @staticmethod
    def refuse_tracing() -> None:
        """Raise where there is one."""

    def listed(self, listed: Sequence[ListedOp], key: Any) -> list[ListedOp]:
        """The list with what `lowered` may bind, as `aside` of its ops."""
        raise NotImplementedError

    def lasts(self, listed: Sequence[ListedOp]) -> bool:
        """Whether later calls may run such a list, too."""
        return True

    def entered(self, listed: Sequence[ListedOp], key: Any) -> None:
        """Make ready what is bound; called in each call of such a list that is not known to be like the last one."""

    def left(self, listed: Sequence[ListedOp]) -> None:
        """The same of a call that nothing surrounds."""

    def only_reading(self) -> contextlib.AbstractContextManager[None]:
        """In here `entered` makes ready what a reference reads, and notes nothing; afterwards all is as it was."""
        return contextlib.nullcontext()

    def facts(self, listed: Sequence[ListedOp]) -> Facts:
        """What holds while what is bound is ready."""
        return Facts()

    def lowered(self, listed: Sequence[ListedOp], call: CallSpecs, key: Any) -> Sequence[ListedOp]:
        """The list as it runs in a call."""
        raise NotImplementedError

    def notes(
        self, listed: Sequence[ListedOp], key: Any, device: torch.device, capability: tuple[int, int] | None
    ) -> Iterable[str]:
        """What plans say of it.

        Args:
            capability: the compute capability of a GPU that is only named.
        """
        return ()

    def undisturbed(self) -> contextlib.AbstractContextManager[None]:
        """Runs in here leave as it was what calls write to."""
        return contextlib.nullcontext()


_known: list[Surrounding] = []


def register(surrounding: Surrounding) -> None:
    """Have calls ask for such surroundings from now on."""
    _known.append(surrounding)


def around(dtype: torch.dtype) -> tuple[Hashable, ...]:
    """What surrounds a call of an x of that dtype now, a key for each kind; empty where nothing does.

    Calls in float64 are surrounded by nothing, but references that are to be exact are (`unrounded`). A compiler cannot
    follow contexts: where something surrounds a reference that it traces, that is refused.
    """
    if torch.compiler.is_dynamo_compiling():
        for s in _known:
            s.refuse_tracing()
        return ()
    if dtype == torch.float64 and rounds():
        return ()
    found = tuple([s.key() for s in _known])
    return found if any(key is not None for key in found) else ()


def of(keys: tuple[Hashable, ...]) -> Iterator[tuple[Surrounding, Hashable]]:
    """The kinds that surround a call, with their keys."""
    return ((s, key) for s, key in zip(_known, keys, strict=False) if key is not None)


def listed_within(listed: Sequence[ListedOp], keys: tuple[Hashable, ...]) -> Sequence[ListedOp]:
    """A list with what its passes may bind, made ready."""
    if not keys:
        return listed
    for surrounding, key in of(keys):
        listed = surrounding.listed(listed, key)
        surrounding.entered(listed, key)
    return listed


def last(listed: Sequence[ListedOp], keys: tuple[Hashable, ...]) -> bool:
    """Whether later calls that are surrounded so may run such a list, too."""
    return all(surrounding.lasts(listed) for surrounding, _ in of(keys))


def enter(listed: Sequence[ListedOp], keys: tuple[Hashable, ...]) -> None:
    """Make ready what such a list binds, for a call that is not known to be like the last one."""
    if not keys:
        for surrounding in _known:
            surrounding.left(listed)
    for surrounding, key in of(keys):
        surrounding.entered(listed, key)


def notes(
    listed: Sequence[ListedOp],
    keys: tuple[Hashable, ...],
    device: torch.device,
    capability: tuple[int, int] | None = None,
) -> Iterator[str]:
    """What plans of such a list say of what surrounds their calls; the capability is that of a GPU only named."""
    for surrounding, key in of(keys):
        yield from surrounding.notes(listed, key, device, capability)


def facts_of(listed: Sequence[ListedOp], keys: tuple[Hashable, ...]) -> Facts:
    """What holds while calls are surrounded so."""
    now = Facts(calls=tuple([(s.key, key) for s, key in zip(_known, keys or [None] * len(_known), strict=True)]))
    return Facts.of([now, *[s.facts(listed) for s, _ in of(keys)]])


@contextlib.contextmanager
def only_reading() -> Iterator[None]:
    """Lists that are made ready in here are those of references, which leave nothing behind."""
    with contextlib.ExitStack() as stack:
        for surrounding in _known:
            stack.enter_context(surrounding.only_reading())
        yield


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Runs in here leave as it was what calls write to beside what they give."""
    with contextlib.ExitStack() as stack:
        for surrounding in _known:
            stack.enter_context(surrounding.undisturbed())
        yield

"""A rank that is in a collective to which another one does not come, since that is ready with something else.

What ranks have run before they run without asking, so where one meets something new it tells so and waits for the
others (`telling`), while these wait for it in a collective. Whoever stands still looks whether one of the others told:
it frees that one by its words, ends its own wait where the backend can (NCCL; gloo waits for the group's timeout, or
until the other one is gone), and what this raises is said in words. As long as collectives go on nothing is asked.

Exchanges by copy engines (`Exchanger`) have no backend that knows of time. Where a device waits in one for longer than
the group's timeout, and nothing new is started meanwhile, its wait is ended in the same way, naming the ranks that say
nothing.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import warnings
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from te_fuser.config import config
from te_fuser.distributed import telling
from te_fuser.distributed.group import Group
from te_fuser.distributed.telling import Disagreement

_SHARE = 0.5  # of the patience: so the one that waits hears why before it gives up
_LOOKS = 16  # in that time
_LONGEST = 10.0  # seconds from one look to the next
_END = 2.0  # seconds that the end of the process waits for a look
_SOON = 0.01  # seconds from one release to the next
_ABORTED = 15.0  # and for the end of a group: NCCL gives up on one that a graph has captured after 10


class Exchanger(Protocol):
    """Exchanges of a group that wait on the device for other ranks."""

    def is_done(self) -> bool:
        """Whether the device is done with all that was started and waited for."""

    def release(self) -> None:
        """Let what waits on the device now go on."""

    def mark(self) -> None:
        """Note that the current stream has replayed some, which `is_done` knows nothing of else."""


class _Standing(NamedTuple):
    """Where this rank stands among the ranks of a group, and since when another one is known to be elsewhere."""

    at: tuple[int, int]
    other: str = ""
    since: float = 0.0


class _Watch:
    """A thread that looks at groups now and then."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self._standing: weakref.WeakKeyDictionary[Any, _Standing] = weakref.WeakKeyDictionary()
        self._exchangers: weakref.WeakKeyDictionary[Any, list[Exchanger]] = weakref.WeakKeyDictionary()
        self._unmoved: weakref.WeakKeyDictionary[Any, tuple[tuple[int, int], float]] = weakref.WeakKeyDictionary()
        self._changed, self._ended, self._thread = threading.Event(), False, threading.Thread()
        self._ending: list[threading.Thread] = []

    def watch(self, groups: Iterable[Group]) -> None:
        """Look at these groups, too; with the patience of now."""
        self.groups.update((group.name, group) for group in groups)
        if self.groups and not self._thread.is_alive() and not self._ended:
            self._thread = threading.Thread(target=self._run, name="te_fuser: ranks in step", daemon=True)
            self._thread.start()
        self._changed.set()

    def watch_exchanger(self, group: Group, exchanger: Exchanger) -> None:
        """Look at its device, too."""
        self._exchangers.setdefault(group.process_group(), []).append(exchanger)
        self.watch((group,))

    def mark_replayed(self, groups: Iterable[Group]) -> None:
        """Note that a graph with exchanges of these groups was replayed."""
        for exchanger in (e for g in groups for e in self._exchangers.get(g.process_group(), ())):
            exchanger.mark()

    def end(self) -> None:
        """Look no more: a thread in native code at the end of the interpreter would abort it."""
        self._ended = True
        self._changed.set()
        begun = time.monotonic()
        for thread, longest in ((self._thread, _END), *[(thread, _ABORTED) for thread in self._ending]):
            if thread.is_alive():
                thread.join(max(begun + longest - time.monotonic(), 0.0))

    def other(self, group: Group) -> str:
        """Another rank of the group that is elsewhere, in words; empty where none is, as far as can be known."""
        try:
            return telling.ahead(group)
        except RuntimeError:  # the store is gone
            known = self._standing.get(group.process_group())
            return known.other if known is not None and known.at == telling.stands(group) else ""

    def _run(self) -> None:
        while not self._ended:
            self._changed.clear()
            for group in [*self.groups.values()]:
                with contextlib.suppress(RuntimeError, ValueError):  # where the group or its store is gone meanwhile
                    self._look(group)
            self._changed.wait(_pause())

    def _look(self, group: Group) -> None:
        if not group.is_here():
            self.groups.pop(group.name)
        if not group.is_here() or telling.broken_by(group):
            return
        ranks = group.process_group()
        before, now = self._standing.get(ranks), time.monotonic()
        at = telling.stands(group)
        if all(exchanger.is_done() for exchanger in self._exchangers.get(ranks, ())):
            self._unmoved[ranks] = at, now
        since = self._unmoved.setdefault(ranks, (at, now))
        if since[0] != at:
            self._unmoved[ranks] = at, now
        elif now - since[1] >= telling.timeout(group):
            telling.give_up(group, _words_of_silence(group, now - since[1]))
            self._end(group)
            return
        found = _Standing(at)
        if before is not None and before.at == found.at:
            if telling.given_up(group):  # by another one that is in this collective, too
                self._end(group)
                return
            if other := telling.ahead(group, waits=True):
                found = _Standing(found.at, other, before.since or now)
        self._standing[ranks] = found
        late = found.other and now - found.since >= _SHARE * min(config.patience, telling.timeout(group))
        if late and telling.stands(group) == found.at:
            _give_up(group, found.other)
            self._end(group)

    def _end(self, group: Group) -> None:
        """End what this rank waits for, beside the looks at others: where a graph has captured it that takes long."""
        self._ending = [thread for thread in self._ending if thread.is_alive()]
        given = group, tuple(self._exchangers.get(group.process_group(), ()))
        self._ending.append(threading.Thread(target=_end, args=given, name="te_fuser: end of a group", daemon=True))
        self._ending[-1].start()


_watch = _Watch()
watch, watch_exchanger, mark_replayed = _watch.watch, _watch.watch_exchanger, _watch.mark_replayed
atexit.register(_watch.end)


def _pause() -> float:
    """Seconds from one look to the next."""
    return min(config.patience / _LOOKS, _LONGEST)


def _give_up(group: Group, other: str) -> None:
    """Tell the others that this rank waits no more."""
    words = f"{group} waits in a collective of what it has run before, while {other}"
    telling.give_up(group, words)
    with contextlib.suppress(RuntimeWarning):  # where warnings are errors
        warnings.warn(words, RuntimeWarning, stacklevel=1)


def _words_of_silence(group: Group, seconds: float) -> str:
    """What is said where a device waits for other ranks: of which some say that they wait, too."""
    store, key = group.process_group().get_group_store(), "te_fuser/waits/{}".format
    others = [rank for rank in range(group.size) if rank != group.rank]
    try:
        store.set(key(group.rank), "")
        time.sleep(2 * _pause())
        silent = [f"{rank}" for rank in others if not store.check([key(rank)])]
    except RuntimeError:  # the store is gone
        silent = [f"{rank}" for rank in others]
    who = f"rank{'s' if len(silent) > 1 else ''} {', '.join(silent)}" if silent else "no other rank"
    return (
        f"the device of {group} waits for {seconds:.0f} s in an exchange by copy engines, as long as the group's "
        f"timeout, and {who} of group {group.title!r} did not come"
    )


def _end(group: Group, exchangers: Sequence[Exchanger]) -> None:
    """End what this rank waits for, when the others that do had time to hear of it: a backend ends the process else."""
    if group.size > 2:
        time.sleep(2 * _pause())
    releasing = threading.Thread(target=_release, args=(exchangers,), name="te_fuser: end of exchanges", daemon=True)
    releasing.start()
    releasing.join(_ABORTED)
    _abort(group)


def _release(exchangers: Sequence[Exchanger]) -> None:
    """Let devices go on that wait for other ranks, until none does."""
    until = time.monotonic() + _ABORTED
    with contextlib.suppress(RuntimeError):  # of a device that has failed
        while time.monotonic() < until and not all(exchanger.is_done() for exchanger in exchangers):
            for exchanger in exchangers:
                exchanger.release()
            time.sleep(_SOON)


def _abort(group: Group) -> None:
    ranks = group.process_group()
    for backend in {ranks._get_backend(device) for device in ranks._device_types}:
        with contextlib.suppress(RuntimeError):  # of one that cannot
            backend.abort()


def explain(error: RuntimeError, groups: Sequence[Group], doing: str) -> None:
    """Of an error in a call that ranks run together, say it in words where one of them is ready with something else.

    Raises:
        Disagreement: then.
    """
    if isinstance(error, Disagreement):
        return
    for group in groups:
        words = telling.broken_by(group)
        if not words and group.is_here() and (other := _watch.other(group)):
            words = f"{group} waited in a collective, while {other}"
            telling.give_up(group, words, for_good=False)
        if words:
            raise Disagreement(f"in {doing}: {words}; {telling.TOGETHER}") from error

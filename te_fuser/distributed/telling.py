"""What the ranks of a group tell one another before they go on together: all go on, or all raise.

It goes through the store by which they found one another, numbered, by no collective: so it never meets data, and a
rank that does not come is named. What ranks tell is lines: where those of two differ, all raise with the first.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from te_fuser.config import config
from te_fuser.distributed.group import Group

_REMEMBERED = 8  # of what was told
_LONGEST = 1800.0  # seconds, where a group says nothing
_SOON = 0.01
_BEGUN, _OVER = "begun", "over"
_TOLD_TO = "_te_fuser_told_to"  # attribute of an error: the groups that know it
REMEDIES = {  # by the first word of a line; of two lines that differ that which stands first here
    "region": "enter regions of FP8 on all ranks that share a model or agree on amaxes, with equal recipes",
    "argument": "call parallelize on all ranks of the mesh, with equal arguments",
    "module": "give parallelize the same model on all ranks of the mesh, made in the same way",
    "together": "call it on all ranks of the group, with equal arguments",
    "x": "give all ranks of the group tensors of one shape and dtype",
    "input": "give all ranks of the group the same named inputs, of one shape and dtype",
    "parameter": "make the model in the same way on each",
    "mode": "put the model in the same mode on each, inside of the same torch.no_grad() or autocast",
    "step": "make the model in the same way on each, with equal options, packages and measured choices (one cache_dir)",
    "sum": "cut the model in the same way on each, and leave sums to an engine on all of them or on none",
    "seed": "call torch.manual_seed with one number on all ranks of the group, and draw the same before the model",
}
_counting = threading.Lock()
_broken: dict[str, tuple[weakref.ref[Any], str]] = {}  # by name: the group, and why nothing of it runs any more
TOGETHER = (
    "ranks of a group call a model equally often, with tensors of one shape, in the same modes and regions of FP8; "
    "what one of them has run before and another one not, it runs without asking"
)
Line = tuple[str, str]  # what is said, as remedies know it, and the words


@dataclass
class _Counts:
    """What this process did in a ProcessGroup, of which another one by its name, made later, knows nothing.

    Attributes:
        told: how often it told the others.
        started: the collectives that te_fuser started, and graphs with some.
        thread: the one that runs what its ranks run together, now.
    """

    told: int = 0
    started: int = 0
    thread: int | None = None


_counts: weakref.WeakKeyDictionary[Any, _Counts] = weakref.WeakKeyDictionary()


def _counts_of(group: Group) -> _Counts:
    ranks = group.process_group()
    found = _counts.get(ranks)
    if found is None:
        with _counting:
            found = _counts.setdefault(ranks, _Counts())
    return found


class Disagreement(RuntimeError):  # noqa: N818 - it is one
    """Ranks of a group are about to do different things together, or one of them cannot or does not come."""


@contextlib.contextmanager
def telling_errors(groups: Sequence[Group]) -> Iterator[None]:
    """An error in here is told to the other ranks, once, which wait for what this one was to tell."""
    try:
        yield
    except Disagreement:
        raise
    except Exception as error:
        with contextlib.suppress(Exception):  # its own error is the one to raise
            told = vars(error).setdefault(_TOLD_TO, set())
            for group in (g for g in groups if g.name not in told):
                told.add(group.name)
                _tell(group, {"error": f"{type(error).__name__}: {error}"})
        raise
    except BaseException:  # an interrupt, after which somebody may go on: what has begun is not told
        for group in groups:
            with contextlib.suppress(Exception):
                group.process_group().get_group_store().delete_key(_key(_next(group), group.rank, _BEGUN))
        raise


def begin(groups: Sequence[Group], words: str) -> None:
    """Tell that this rank is making ready what it tells next: others wait for it as long as for a collective."""
    for group in filter(Group.is_here, groups):
        said = json.dumps({"begun": words, "entered": entered(group)})
        group.process_group().get_group_store().set(_key(_next(group), group.rank, _BEGUN), said)


def compare(groups: Sequence[Group], lines: Sequence[Line]) -> None:
    """Hold what this rank is about to do against what the others are; of a group that is missing its ops tell.

    Raises:
        Disagreement: on all ranks, naming them and the first difference; or the error of one, or who does not come.
    """
    numbers = [(group, _tell(group, {"lines": lines})) for group in groups if group.is_here()]
    with _waiting(numbers):
        if len(numbers) > 1:
            _hear_what_comes(numbers, lines)
        for group, number in numbers:
            _hear(group, number, lines, min(config.patience, timeout(group)))


def of_all(groups: Sequence[Group], what: str, value: Any) -> list[Any]:
    """What each rank gives, in the order of the ranks; of several groups, the dimensions of a mesh, that of all.

    Args:
        what: is done together, in words, which are compared.
        value: what json can write.

    Raises:
        Disagreement: see `compare`.
    """
    found, lines = [value], [("together", what)]
    for group in groups:
        number = _tell(group, {"lines": lines, "value": found})
        with _waiting([(group, number)]):
            found = [one for told in _hear(group, number, lines, timeout(group)) for one in told["value"]]
    return found


def of_first(groups: Sequence[Group], what: str, value: Any) -> Any:
    """What the first rank gives."""
    return of_all(groups, what, value)[0]


def shown(value: object) -> str:
    """A value as a line says it: without addresses, in which ranks differ."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def entered(group: Group) -> int:
    """How many collectives of a group te_fuser has started on this rank, replays of graphs counted as one.

    Those of users, engines and PyTorch are not among them: ranks need not run equally many (sends from one to another).
    """
    return _counts_of(group).started


def start(group: Group) -> None:
    """Count a collective of a group that is about to start, or a replay of a graph with some.

    Raises:
        Disagreement: where a collective of the group was given up.
    """
    check(group)
    _counts_of(group).started += 1


@contextlib.contextmanager
def alone(groups: Sequence[Group]) -> Iterator[None]:
    """In here no other thread runs what the ranks of these groups run together: their order would differ among ranks.

    A group that is not here counts not: the op that asks for it says so, by its name.

    Raises:
        Disagreement: where one does, which the other ranks hear.
    """
    groups = [group for group in groups if group.is_here()]
    me, counts = threading.get_ident(), [_counts_of(group) for group in groups]
    with _counting:
        busy = [g for g, c in zip(groups, counts, strict=True) if c.thread not in (None, me)]
        before = [c.thread for c in counts]
        if not busy:
            for c in counts:
                c.thread = me
    if busy:
        words = (
            f"two threads of {busy[0]} run models at once that the ranks of this group share, and ranks may run their "
            "collectives in different orders: give each thread a group of its own, or have them wait for each other"
        )
        give_up(busy[0], words, for_good=False)
        raise Disagreement(words)
    try:
        yield
    finally:
        for c, thread in zip(counts, before, strict=True):
            c.thread = thread


def stands(group: Group) -> tuple[int, int]:
    """Where this rank is: what it tells next, and the collectives that it has started."""
    return _next(group), entered(group)


def ahead(group: Group, waits: bool = False) -> str:
    """In words another rank that is ready with something, and has not started what this one has; else empty.

    Args:
        waits: whether it has to wait for this one still.
    """
    store, (number, own) = group.process_group().get_group_store(), stands(group)
    if store.check([_key(number, group.rank, _BEGUN)]):
        return ""
    for rank in (r for r in range(group.size) if r != group.rank):
        keys = _key(number, rank), _key(number, rank, _BEGUN)
        told = next((json.loads(store.get(key)) for key in keys if store.check([key])), {"entered": own})
        over = "error" in told or store.check([_key(number, rank, _OVER)])
        if told["entered"] < own and not (waits and over):
            return f"rank {rank} of group {group.title!r} {_doing(told)}"
    return ""


def _doing(told: Mapping[str, Any]) -> str:
    if "error" in told:
        return f"cannot go on: {told['error']}"
    return f"has begun {told['begun']}" if "begun" in told else f"is ready with {told['lines'][0][1]}"


def give_up(group: Group, words: str, for_good: bool = True) -> None:
    """Tell the other ranks why this one does not come; for good: and run no collective of the group any more, all."""
    with contextlib.suppress(RuntimeError):  # where the store is gone they hear by that
        _tell(group, {"error": words, "for_good": for_good})
    if for_good:
        _broken[group.name] = weakref.ref(group.process_group()), words


def given_up(group: Group) -> str:
    """Why another rank gave up a collective of the group for good, which this one goes by from now on; else empty."""
    store, number = group.process_group().get_group_store(), _next(group)
    for key in (_key(number, rank) for rank in range(group.size) if rank != group.rank):
        if store.check([key]):
            _hear_end(group, json.loads(store.get(key)))
    return broken_by(group)


def _hear_end(group: Group, told: Mapping[str, Any]) -> None:
    if told.get("for_good"):  # what the other one has ended would be waited for here
        _broken[group.name] = weakref.ref(group.process_group()), told["error"]


def broken_by(group: Group) -> str:
    """Why a collective of the group was given up for good; empty where none was."""
    ranks, words = _broken.get(group.name, (None, ""))
    return words if ranks is not None and group.is_here() and ranks() is group.process_group() else ""


def check(group: Group) -> None:
    """Raise where a collective of the group was given up for good.

    Raises:
        Disagreement: then.
    """
    if _broken and (words := broken_by(group)):
        raise Disagreement(f"{words}. Nothing runs in group {group.title!r} any more: end the processes")


def _next(group: Group) -> int:
    """The number of what is told next."""
    return _counts_of(group).told + 1


def _tell(group: Group, said: Mapping[str, object]) -> int:
    """Tell the ranks of a group; the number of what was told."""
    check(group)
    own = _counts_of(group)
    with _counting:
        number = own.told = own.told + 1
    store = group.process_group().get_group_store()
    store.set(_key(number, group.rank), json.dumps({**said, "entered": entered(group)}))
    if number > _REMEMBERED:  # nobody asks for it any more
        for more in ((), (_BEGUN,), (_OVER,)):
            store.delete_key(_key(number - _REMEMBERED, group.rank, *more))
    return number


def _key(number: int, rank: int, *more: str) -> str:
    return "/".join(["te_fuser/lockstep", f"{number}", f"{rank}", *more])


@contextlib.contextmanager
def _waiting(numbers: Sequence[tuple[Group, int]]) -> Iterator[None]:
    """Say that this rank waits no more, where it raises."""
    try:
        yield
    except Disagreement:
        for group, number in numbers:
            group.process_group().get_group_store().set(_key(number, group.rank, _OVER), "")
        raise


def _hear(group: Group, number: int, lines: Sequence[Line], patience: float) -> list[dict[str, Any]]:
    """What all ranks tell, where it is what this one does."""
    heard = []
    for rank in range(group.size):
        heard.append(_told_by(group, number, rank, lines, patience))
        _check(group, rank, heard[-1], lines)
    return heard


def _hear_what_comes(numbers: Sequence[tuple[Group, int]], lines: Sequence[Line]) -> None:
    """Hear what is told in several groups as it comes: who differs in one may never come in another."""
    waiting = [(group, number, rank) for group, number in numbers for rank in range(group.size)]
    until = time.monotonic() + min(config.patience, *[timeout(group) for group, _ in numbers])
    while waiting and time.monotonic() < until:
        for group, number, rank in [*waiting]:
            store, key = group.process_group().get_group_store(), _key(number, rank)
            if store.check([key]):
                with _leaving([(g, n) for g, n in numbers if g is not group]):
                    _check(group, rank, json.loads(store.get(key)), lines)
                waiting.remove((group, number, rank))
        time.sleep(_SOON if waiting else 0.0)


@contextlib.contextmanager
def _leaving(others: Sequence[tuple[Group, int]]) -> Iterator[None]:
    """A disagreement in one group is what those of others hear, who come later."""
    try:
        yield
    except Disagreement as error:
        for group, number in others:
            said = json.dumps({"error": f"{error}", "entered": entered(group)})
            group.process_group().get_group_store().set(_key(number, group.rank), said)
        raise


def _check(group: Group, rank: int, told: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Raise where a rank told an error, or something else than this one."""
    if "error" in told:
        _hear_end(group, told)
        raise Disagreement(
            f"rank {rank} of group {group.title!r} cannot run this call, so no rank of it does: {told['error']}"
        )
    theirs = [(kind, words) for kind, words in told["lines"]]
    if theirs != list(lines):
        raise Disagreement(_difference(group, rank, theirs, lines))


def _told_by(group: Group, number: int, rank: int, lines: Sequence[Line], patience: float) -> dict[str, Any]:
    """What a rank tells; who has begun is waited for as long as in a collective.

    Raises:
        Disagreement: when it does not come, which the others hear then, too.
    """
    store, key, longest = group.process_group().get_group_store(), _key(number, rank), timeout(group)
    begun = _key(number, rank, _BEGUN)
    came = _comes(store, key, patience)
    if not came and store.check([begun]):
        came, patience = _comes(store, key, max(longest - patience, _SOON)), longest
    if came:
        return json.loads(store.get(key))  # type: ignore[no-any-return]
    doing = f"{_doing(json.loads(store.get(begun)))} and is not done" if store.check([begun]) else "did not come"
    error = (
        f"rank {rank} of group {group.title!r} {doing} within {patience:.3g} s, while {group} is ready with "
        f"{lines[0][1]}: {TOGETHER}. Where it is only "
        f"late, raise te_fuser.config.patience, which the group's timeout of {longest:.0f} s bounds"
    )
    store.set(
        _key(number, group.rank), json.dumps({"error": f"{group} gave up, as {error}", "entered": entered(group)})
    )
    raise Disagreement(error)


def _comes(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def timeout(group: Group) -> float:
    """Seconds after which a collective of the group fails."""
    ranks = group.process_group()
    options = [getattr(ranks._get_backend(device), "options", None) for device in ranks._device_types]
    found = [getattr(o, "_timeout", timedelta(seconds=_LONGEST)).total_seconds() for o in options]
    return min(found, default=_LONGEST)


def _difference(group: Group, rank: int, theirs: Sequence[Line], ours: Sequence[Line]) -> str:
    """Where two ranks begin to differ, in words that are the same whoever says them."""
    pairs = list(zip(theirs, ours, strict=False))
    at = next((k for k, (a, b) in enumerate(pairs) if a != b), len(pairs))
    kinds = [lines[at][0] for lines in (theirs, ours) if at < len(lines)]
    said = {rank: theirs, group.rank: ours}
    has = [f"rank {r} has {lines[at][1] if at < len(lines) else 'nothing more'}" for r, lines in sorted(said.items())]
    remedy = next(REMEDIES[kind] for kind in REMEDIES if kind in kinds)
    return (
        f"the ranks of group {group.title!r} are about to do different things together: {'; '.join(has)}. "
        f"{remedy.capitalize()}"
    )

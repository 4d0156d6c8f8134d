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
from datetime import timedelta
from typing import Any

from te_fuser.config import config
from te_fuser.ops.group import Group

_REMEMBERED = 8  # of what was told
_LONGEST = 1800.0  # seconds, where a group says nothing
_SOON = 0.01
_BEGUN = "begun"
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
_told: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # how often this process told a ProcessGroup
_counting = threading.Lock()
Line = tuple[str, str]  # what is said, as remedies know it, and the words


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


def begin(groups: Sequence[Group], words: str) -> None:
    """Tell that this rank is making ready what it tells next: others wait for it as long as for a collective."""
    for group in filter(Group.is_here, groups):
        ranks = group.process_group()
        with _counting:
            number = _told.get(ranks, 0) + 1
        ranks.get_group_store().set(_key(number, group.rank, _BEGUN), words)


def compare(groups: Sequence[Group], lines: Sequence[Line]) -> None:
    """Hold what this rank is about to do against what the others are; of a group that is missing its ops tell.

    Raises:
        Disagreement: on all ranks, naming them and the first difference; or the error of one, or who does not come.
    """
    numbers = [(group, _tell(group, {"lines": lines})) for group in groups if group.is_here()]
    if len(numbers) > 1:
        _hear_what_comes(numbers, lines)
    for group, number in numbers:
        _hear(group, number, lines, min(config.patience, _timeout(group)))


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
        found = [one for told in _hear(group, number, lines, _timeout(group)) for one in told["value"]]
    return found


def of_first(groups: Sequence[Group], what: str, value: Any) -> Any:
    """What the first rank gives."""
    return of_all(groups, what, value)[0]


def shown(value: object) -> str:
    """A value as a line says it: without addresses, in which ranks differ."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _tell(group: Group, said: Mapping[str, object]) -> int:
    """Tell the ranks of a group; the number of what was told."""
    ranks = group.process_group()
    with _counting:
        number = _told[ranks] = _told.get(ranks, 0) + 1
    store = ranks.get_group_store()
    store.set(_key(number, group.rank), json.dumps(said))
    if number > _REMEMBERED:  # nobody asks for it any more
        for more in ((), (_BEGUN,)):
            store.delete_key(_key(number - _REMEMBERED, group.rank, *more))
    return number


def _key(number: int, rank: int, *more: str) -> str:
    return "/".join(["te_fuser/lockstep", f"{number}", f"{rank}", *more])


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
    until = time.monotonic() + min(config.patience, *[_timeout(group) for group, _ in numbers])
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
            said = json.dumps({"error": f"{error}"})
            group.process_group().get_group_store().set(_key(number, group.rank), said)
        raise


def _check(group: Group, rank: int, told: Mapping[str, Any], lines: Sequence[Line]) -> None:
    """Raise where a rank told an error, or something else than this one."""
    if "error" in told:
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
    store, key, longest = group.process_group().get_group_store(), _key(number, rank), _timeout(group)
    begun = _key(number, rank, _BEGUN)
    came = _comes(store, key, patience)
    if not came and store.check([begun]):
        came, patience = _comes(store, key, max(longest - patience, _SOON)), longest
    if came:
        return json.loads(store.get(key))  # type: ignore[no-any-return]
    doing = f"has begun {store.get(begun).decode()} and is not done" if store.check([begun]) else "did not come"
    error = (
        f"rank {rank} of group {group.title!r} {doing} within {patience:.3g} s, while {group} is ready with "
        f"{lines[0][1]}: ranks of a group call a model equally often, with tensors of one shape, in the same modes and "
        "regions of FP8; what one of them has run before and another one not, it runs without asking. Where it is only "
        f"late, raise te_fuser.config.patience, which the group's timeout of {longest:.0f} s bounds"
    )
    store.set(_key(number, group.rank), json.dumps({"error": f"{group} gave up, as {error}"}))
    raise Disagreement(error)


def _comes(store: Any, key: str, seconds: float) -> bool:
    try:
        store.wait([key], timedelta(seconds=seconds))
    except RuntimeError:
        return False
    return True


def _timeout(group: Group) -> float:
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

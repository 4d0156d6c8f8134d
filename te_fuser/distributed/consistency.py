"""Comparisons between the ranks of a group before they run something new together: all go on, or all raise.

Each is one all-gather of small objects through the store by which the ranks found one another. It is no collective, so
it never meets data: a rank that runs something else meanwhile is named when the group's timeout is over.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from te_fuser.distributed.group import Group

Line = tuple[str, str]  # the kind of thing that is compared, and its words
REMEDIES = {  # by the kind of a line; of two lines that differ that which stands first here
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
_SOON, _PAUSE = 0.0005, 0.1  # seconds from one look at the store to the next, at first and at most
_KEPT = 8  # comparisons whose keys stay in the store: slow ranks may read them still
_LONGEST = 1800.0  # seconds, where a group has no timeout
_KNOWN_BY = "_te_fuser_known_by"  # attribute of an error: names of the groups whose other ranks have it


class RankMismatchError(RuntimeError):
    """Ranks of a group would run different things together, or one raised or did not come."""


# By ProcessGroup: the numbers of comparisons, and a lock of the thread that runs what its ranks run together.
_counts: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
_running: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def compare(groups: Sequence[Group], lines: Sequence[Line], doing: str = "", value: Any = None) -> list[Any]:
    """Compare on all ranks of these groups what each is about to do; gives the values of all, in the order of ranks.

    Digests are compared, and the lines where these differ. Group by group, the dimensions of a mesh, and what is wrong
    in one the next ones hear: so an error on one rank of a mesh comes to all. Of a group that is not here its ops tell.

    Args:
        doing: in words, for ranks that wait; the first line by default.
        value: what json can write.

    Raises:
        RankMismatchError: on all ranks, with the first difference, the error that one raised, or who did not come.
    """
    here, doing = [group for group in groups if group.is_here()], doing or lines[0][1]
    found, digest = [value], hashlib.blake2b(json.dumps(lines).encode()).hexdigest()
    for k, group in enumerate(here):
        try:
            given = _all_gather(group, [digest, found], doing)
            if any(other != digest for other, _ in given):
                raise RankMismatchError(_first_difference(group, _all_gather(group, lines, doing)))
        except RankMismatchError as error:
            _post_error(here[k + 1 :], f"{error}")
            raise
        found = [one for _, values in given for one in values]
    return found


def gather_values(groups: Sequence[Group], what: str, value: Any) -> list[Any]:
    """The value of each rank, by words for it, as `compare` gives them."""
    for group in groups:
        group.process_group()
    return compare(groups, [("together", what)], value=value)


@contextlib.contextmanager
def shared_errors(groups: Sequence[Group]) -> Iterator[None]:
    """Context in which other ranks find an error in place of a comparison."""
    try:
        yield
    except RankMismatchError:  # which they have
        raise
    except Exception as error:  # but no interrupt, after which somebody may call again
        known_by = vars(error).setdefault(_KNOWN_BY, set())
        _post_error([group for group in groups if group.name not in known_by], f"{type(error).__name__}: {error}")
        known_by.update(group.name for group in groups)
        raise


@contextlib.contextmanager
def one_thread(groups: Sequence[Group]) -> Iterator[None]:
    """Context in which one thread alone runs what these groups' ranks run."""
    with contextlib.ExitStack() as held:
        for group in filter(Group.is_here, groups):
            lock = _running.setdefault(group.process_group(), threading.RLock())
            if not lock.acquire(blocking=False):
                raise RankMismatchError(
                    f"two threads of {group} run models at once that the ranks of this group share, and ranks may run "
                    "their collectives in different orders: give each thread a group of its own, or have them wait "
                    "for each other"
                )
            held.callback(lock.release)
        yield


def timeout(group: Group) -> float:
    """Seconds after which a collective of the group fails."""
    ranks = group.process_group()
    options: list[Any] = [getattr(ranks._get_backend(device), "options", None) for device in ranks._device_types]
    return min((o._timeout.total_seconds() for o in options if hasattr(o, "_timeout")), default=_LONGEST)


def shown(value: object) -> str:
    """A value's repr without addresses, in which ranks differ."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _all_gather(group: Group, said: Any, doing: str) -> list[Any]:
    """The words of each rank, unless one has an error in their place."""
    store, longest = group.process_group().get_group_store(), timeout(group)
    until, pause = time.monotonic() + longest, _SOON
    try:
        number = _post(group, {"said": said})
        keys = [_key(number, rank) for rank in range(group.size)]
        while not (store.check(keys) or store.check([_key(number, "error")]) or time.monotonic() > until):
            time.sleep(pause)  # a wait of the store would write a warning at its end
            pause = min(2 * pause, _PAUSE)
        heard = {rank: json.loads(store.get(key)) for rank, key in enumerate(keys) if store.check([key])}
    except RuntimeError as error:
        words = f"{group} is ready with {doing}, and cannot reach the store by which the ranks compare it"
        raise RankMismatchError(f"{words}, maybe since the process that has it ended: {error}") from error
    for rank in (r for r, told in heard.items() if "error" in told):
        words = f"rank {rank} of group {group.title!r} cannot run this call, so no rank of it does"
        raise RankMismatchError(f"{words}: {heard[rank]['error']}")
    if late := [f"{rank}" for rank in range(group.size) if rank not in heard]:
        words = (
            f"rank{'s' * (len(late) > 1)} {', '.join(late)} of group {group.title!r} did not come within the group's "
            f"timeout of {longest:.3g} s"
        )
        _post(group, {"error": f"{group} gave up, as {words}"}, number)
        raise RankMismatchError(
            f"{words}, while {group} is ready with {doing}: ranks of a group call a model equally often, with tensors "
            "of one shape, in the same modes and regions of FP8; what a rank has run before it runs without asking"
        )
    return [heard[rank]["said"] for rank in range(group.size)]


def _post(group: Group, said: dict[str, Any], number: int = 0) -> int:
    """Leave in the store this rank's part of a comparison; gives its number."""
    ranks = group.process_group()
    store, number = ranks.get_group_store(), number or next(_counts.setdefault(ranks, itertools.count(1)))
    store.set(_key(number, group.rank), json.dumps(said))
    if "error" in said:
        store.set(_key(number, "error"), "")  # so that nobody waits for others
    for who in (group.rank, "error") if number > _KEPT else ():
        store.delete_key(_key(number - _KEPT, who))
    return number


def _post_error(groups: Sequence[Group], words: str) -> None:
    for group in groups:
        with contextlib.suppress(RuntimeError):  # this rank's own error is the one to raise
            _post(group, {"error": words})


def _key(number: int, who: int | str) -> str:
    return f"te_fuser/compared/{number}/{who}"


def _first_difference(group: Group, given: Sequence[Sequence[Sequence[str]]]) -> str:
    """The first line in which a rank differs from rank 0, in the same words on all."""
    rank, lines = next((k, lines) for k, lines in enumerate(given) if lines != given[0])
    one, other = next(pair for pair in itertools.zip_longest(given[0], lines, fillvalue=None) if pair[0] != pair[1])
    kinds = [line[0] for line in (one, other) if line is not None]
    has = [f"rank {r} has {'nothing more' if line is None else line[1]}" for r, line in ((0, one), (rank, other))]
    remedy = next(REMEDIES[kind] for kind in REMEDIES if kind in kinds)
    return (
        f"the ranks of group {group.title!r} are about to do different things together: {'; '.join(has)}. "
        f"{remedy.capitalize()}"
    )

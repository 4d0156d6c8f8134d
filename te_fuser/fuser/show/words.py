"""How numbers, ranges of ops and lists of places are written where a plan is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any


def grouped(entries: Iterable[Any], key: Callable[[Any], Any]) -> dict[Any, list[Any]]:
    """The entries by what `key` says of each, in the order of the first of each."""
    found: dict[Any, list[Any]] = {}
    for entry in entries:
        found.setdefault(key(entry), []).append(entry)
    return found


def count(number: int, noun: str, ending: str = "s") -> str:
    """So many of them ("1 op", "2 ops"); of several words the first has the ending."""
    if number == 1:
        return f"1 {noun}"
    first, _, rest = noun.partition(" ")
    return f"{number} {first}{ending}{' ' + rest if rest else ''}"


def multiple(number: int) -> str:
    """What stands before that which is there so often: "2 x ", nothing before one."""
    return f"{number} x " if number > 1 else ""


def and_others(number: int) -> str:
    """What stands behind the first of several: " and 2 others like it"."""
    return f" and {count(number - 1, 'other')} like it" if number > 1 else ""


def span(ops: tuple[int, int]) -> str:
    """The first and the last op: "3-5", or "3"."""
    return str(ops[0]) if ops[0] == ops[1] else f"{ops[0]}-{ops[1]}"


def range_of(first: int, last: int) -> str:
    """The ops from the first to the last: "ops 3-5", or "op 3"."""
    return f"op {first}" if first == last else f"ops {first}-{last}"


def few(texts: Sequence[str], most: int) -> list[str]:
    """The first `most`, and how many more there are."""
    return list(texts) if len(texts) <= most else [*texts[:most], f"{len(texts) - most} more places"]

"""Entries of the record: each contender's numbers, and these over the others'.

An entry: {"case": name, "contenders": {name: numbers}, ...}. Contenders whose names begin with "te_fuser" are ours,
"floor" and "copy" are what nobody can beat, the others are rivals. An entry may also have "goals" (what was to be
reached, and whether it was) and "left_out" (contenders that could not take part, and why).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.measure import Card, Result, Step, kept_bytes, peak_bytes, traced
from benchmarks.models import Rival

Entry = dict[str, Any]
OURS = "te_fuser"
BOUNDS = ("floor", "copy")
MIB = 2.0**20


def attempt(entry: Entry, what: str, measure: Callable[[], object]) -> None:
    """Measure more of an entry; what fails does not take the rest along."""
    try:
        measure()
    except Exception as error:
        entry.setdefault("left_out", {})[what] = why(error)


def why(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


_LONGEST_REASON = 500


def memory_of(rival: Rival, card: Card) -> dict[str, Any]:
    """Bytes that a step keeps for backward, and its peak where there is a GPU."""
    rival.clear()
    peak = peak_bytes(rival.forward_and_backward, card)
    rival.clear()
    kept = kept_bytes(lambda: rival.model(rival.x, **rival.named), list(rival.model.parameters()))
    return {"kept_mib": kept / MIB, **({} if peak is None else {"peak_mib": peak / MIB})}


def add_details(entry: Entry, steps: Mapping[str, Step], found: Mapping[str, Rival], card: Card) -> None:
    """The kernels of each contender, and what each rival keeps in memory."""
    attempt(entry, "kernels", lambda: _add_kernels(entry, steps, card))
    attempt(entry, "memory", lambda: _add_memory(entry, found, card))


def _add_kernels(entry: Entry, steps: Mapping[str, Step], card: Card) -> None:
    for name, step in steps.items():
        trace = traced(step, card)
        entry["contenders"][name] |= trace.as_data() if trace else {}


def _add_memory(entry: Entry, found: Mapping[str, Rival], card: Card) -> None:
    for name, rival in found.items():
        entry["contenders"][name] |= memory_of(rival, card)
    eager = entry["contenders"]["eager"].get("peak_mib")
    for data in entry["contenders"].values():
        if eager and "peak_mib" in data:
            data["peak_over_eager"] = data["peak_mib"] / eager


def compared(case: str, results: Mapping[str, Result]) -> Entry:
    """An entry with every contender's numbers over the floor's, eager's and the best rival's."""
    bound = next((results[name] for name in BOUNDS if name in results), None)
    contenders = {name: result.as_data() for name, result in results.items()}
    for name, data in contenders.items():
        if bound is not None:
            data["over_floor"] = results[name].over(bound)
        if "eager" in results:
            data["over_eager"] = results[name].over(results["eager"])
    entry: Entry = {"case": case, "contenders": contenders}
    if bound is not None and "eager" in results:
        _add_earlier(entry)
    _add_best_rival(entry)
    return entry


def _add_earlier(entry: Entry) -> None:
    """Rivals that are not here stand by what they reached earlier."""
    earlier = libraries.earlier_over_floor(entry["case"], entry["contenders"]["eager"]["over_floor"])
    missing = {name: ratio for name, ratio in earlier.items() if name not in entry["contenders"]}
    if missing:
        entry["earlier"] = {"source": libraries.EARLIER_SOURCE, "over_floor": missing}


def _add_best_rival(entry: Entry) -> None:
    contenders = entry["contenders"]
    measure = "over_floor" if any("over_floor" in data for data in contenders.values()) else "ms"
    known = {name: data[measure] for name, data in contenders.items() if _is_rival(name)}
    known |= entry.get("earlier", {}).get("over_floor", {})
    if not known:
        return
    best = min(known, key=lambda name: known[name])
    entry["best_rival"] = best
    for name, data in contenders.items():
        if name.startswith(OURS):
            data["over_best_rival"] = data[measure] / known[best]


def _is_rival(name: str) -> bool:
    return name not in BOUNDS and not name.startswith(OURS)

"""Schedules that were measured to be the best, on disk: by GPU, kernel and number of rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from te_fuser.codegen.cache_files import EntryFile
from te_fuser.codegen.schedule import Kind, Schedule, Sums

ANY_ROWS = "any"


def shape_class(rows: int | None) -> str:
    """Class of kernels by rows, up to a power of two; "any" where none matter."""
    if rows is None:
        return ANY_ROWS
    if rows < 0:
        raise ValueError(f"a kernel cannot have {rows} rows")
    return f"rows<={1 << max(0, rows - 1).bit_length()}"


class TunedSchedules(EntryFile):
    """The schedules for one kind of GPU in one file."""

    suffix = ".schedules.json"

    def find(self, key: str, rows: int | None = None) -> tuple[Schedule, ...]:
        """The schedules of the kernel with this key, one for each of its launches over rows; empty if not tuned.

        What was measured with about as many rows comes before what was measured for any.
        """
        shapes = self.entries().get(key, {})
        for shape in dict.fromkeys((shape_class(rows), ANY_ROWS)):
            if isinstance(shapes.get(shape), dict):
                return _schedules(shapes[shape].get("schedules"))
        return ()

    def put(self, key: str, schedules: Sequence[Schedule], rows: int | None = None, **measured: object) -> None:
        """Keep a kernel's best schedules with their times, beside what others wrote meanwhile."""
        if not schedules:
            raise ValueError("there is no schedule to keep")
        found = {"schedules": [dataclasses.asdict(s) for s in schedules], **measured}
        self.change(lambda entries: entries.setdefault(key, {}).update({shape_class(rows): found}))


def store_for(gpu: str, folder: Path | None = None) -> TunedSchedules:
    """The store for a kind of GPU; in the cache folder if no other is given."""
    return TunedSchedules.of(gpu, folder)


def _schedules(listed: object) -> tuple[Schedule, ...]:
    """Schedules as they are in the file; none if one of them is not whole."""
    if not isinstance(listed, list):
        return ()
    names = {f.name for f in dataclasses.fields(Schedule)}
    for s in listed:
        if not isinstance(s, dict) or set(s) != names:
            return ()
        if not all(isinstance(s[n], int) for n in names - {"kind", "sums"}):
            return ()
    try:
        return tuple(Schedule(**{**s, "kind": Kind(s["kind"]), "sums": Sums(s["sums"])}) for s in listed)
    except ValueError:
        return ()

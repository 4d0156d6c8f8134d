"""Schedules that were measured to be the best, on disk: by GPU, kernel and number of rows.

A file that cannot be read, or an entry that does not fit its kernel any more, counts as none: then the model decides.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from te_fuser.codegen.schedule import Kind, Schedule, Sums

_FORMAT = 1  # of the file, and of what a schedule means
ANY_ROWS = "any"


def shape_class(rows: int | None) -> str:
    """What kernels with about as many rows share: the power of two that is not below; "any" where it does not matter.

    Raises:
        ValueError: for a negative number.
    """
    if rows is None:
        return ANY_ROWS
    if rows < 0:
        raise ValueError(f"a kernel cannot have {rows} rows")
    return f"rows<={1 << max(0, rows - 1).bit_length()}"


@dataclass
class TunedSchedules:
    """The schedules for one kind of GPU in one file, which several processes may write."""

    path: Path
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _stamp: tuple[int, int] | None = None
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)

    def find(self, key: str, rows: int | None = None) -> tuple[Schedule, ...]:
        """The schedules of the kernel with this key, one for each of its launches over rows; empty if not tuned.

        What was measured with about as many rows comes before what was measured for any.
        """
        with self._lock:
            self._refresh()
            shapes = self._entries.get(key, {})
            for shape in dict.fromkeys((shape_class(rows), ANY_ROWS)):
                if shape in shapes:
                    return _schedules(shapes[shape].get("schedules"))
        return ()

    def put(self, key: str, schedules: Sequence[Schedule], rows: int | None = None, **measured: object) -> None:
        """Keep the best schedules of a kernel, and what was measured of them; what others wrote meanwhile stays.

        Raises:
            ValueError: without a schedule.
            OSError: when the file cannot be written.
        """
        if not schedules:
            raise ValueError("there is no schedule to keep")
        found = {"schedules": [dataclasses.asdict(s) for s in schedules], **measured}
        with self._lock:
            entries = _read(self.path)
            entries.setdefault(key, {})[shape_class(rows)] = found
            _write(self.path, entries)
            self._stamp = None

    def _refresh(self) -> None:
        stamp = _stamp_of(self.path)
        if stamp != self._stamp:
            self._entries, self._stamp = _read(self.path), stamp


def store_for(gpu: str, folder: Path) -> TunedSchedules:
    """The store for a kind of GPU, by its name, in the cache folder `folder`."""
    name = "".join(c if c.isalnum() else "-" for c in gpu.lower())
    path = folder / "tuned" / f"{name}.schedules.json"
    with _stores_lock:
        return _stores.setdefault(path, TunedSchedules(path))


_stores: dict[Path, TunedSchedules] = {}
_stores_lock = threading.Lock()


def _schedules(listed: object) -> tuple[Schedule, ...]:
    """Schedules as they are in the file; none if one of them is not whole."""
    if not isinstance(listed, list) or not all(isinstance(s, dict) and _is_whole(s) for s in listed):
        return ()
    try:
        return tuple(Schedule(**{**s, "kind": Kind(s["kind"]), "sums": Sums(s["sums"])}) for s in listed)
    except ValueError:
        return ()


def _is_whole(found: dict[str, Any]) -> bool:
    names = {f.name for f in dataclasses.fields(Schedule)}
    return set(found) == names and all(isinstance(found[n], int) for n in names - {"kind", "sums"})


def _stamp_of(path: Path) -> tuple[int, int]:
    """What changes when the file is written; the same as long as there is none."""
    try:
        found = path.stat()
    except OSError:
        return (0, 0)
    return (found.st_mtime_ns, found.st_ino)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict) or found.get("format") != _FORMAT or not isinstance(found.get("kernels"), dict):
        return {}
    return {k: e for k, e in found["kernels"].items() if isinstance(e, dict)}


def _write(path: Path, entries: dict[str, dict[str, Any]]) -> None:
    """Another process sees all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".new")
    try:
        with os.fdopen(handle, "w") as file:
            json.dump({"format": _FORMAT, "kernels": entries}, file, indent=1)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise

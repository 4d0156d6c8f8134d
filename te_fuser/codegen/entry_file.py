"""Entries by key in a JSON file that several processes may write: what was measured, beside the compiled kernels."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from te_fuser.codegen.cache_folder import user_cache_dir
from te_fuser.codegen.whole_file import write_whole
from te_fuser.config import config

Entries = dict[str, dict[str, Any]]
Store = TypeVar("Store")
_changing = threading.Lock()  # one for all files: threads of this process never lose each other's entries


class EntryFile:
    """The entries of one file. A file that cannot be read, or is of another format, counts as empty."""

    def __init__(self, path: Path, form: int) -> None:
        self.path, self.form = path, form
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._entries: Entries = {}

    def entries(self) -> Entries:
        """All entries, read again when the file has changed; not to be written to."""
        with self._lock:
            stamp = (0, 0)  # of no file
            with contextlib.suppress(OSError):
                found = self.path.stat()
                stamp = (found.st_mtime_ns, found.st_ino)
            if stamp != self._stamp:
                self._entries, self._stamp = self._read(), stamp
            return self._entries

    def change(self, change: Callable[[Entries], None]) -> None:
        """Change the entries as they are on disk now, so that what others wrote stays.

        Raises:
            OSError: when the file cannot be written.
        """
        with _changing, _alone(self.path.parent):
            entries = self._read()
            change(entries)
            self._write(entries)

    def _read(self) -> Entries:
        try:
            found = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        if (
            not isinstance(found, dict)
            or found.get("format") != self.form
            or not isinstance(found.get("entries"), dict)
        ):
            return {}
        return {key: entry for key, entry in found["entries"].items() if isinstance(entry, dict)}

    def _write(self, entries: Entries) -> None:
        write_whole(self.path, json.dumps({"format": self.form, "entries": entries}, indent=1).encode())


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Other processes change files of this folder before or after; where it cannot be locked, entries may be lost."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # which lets the next one in


def tuned_folder(folder: Path | None = None) -> Path:
    """Folder of measured choices: `tuned` in the given folder or, if none is given, in the cache folder as set now."""
    if folder or config.cache_dir:
        return (folder or config.cache_dir) / "tuned"  # type: ignore[operator]
    home = user_cache_dir()
    with contextlib.suppress(OSError):  # they lay among the CPU's kernels once; what is at the new place counts more
        (home / "cpu" / "tuned").rename(home / "tuned")
    return home / "tuned"


class Stores(Generic[Store]):
    """Stores of one kind, one for each device: `tuned/<device><suffix>` in the cache folder.

    Args:
        make: path -> a store.
    """

    def __init__(self, make: Callable[[Path], Store], suffix: str) -> None:
        self._make, self._suffix = make, suffix
        self._made: dict[Path, Store] = {}
        self._lock = threading.Lock()

    def of(self, device: str, folder: Path | None = None) -> Store:
        """The store of a device, by its name; in the cache folder as it is set now if no other is given."""
        name = "".join(c if c.isalnum() else "-" for c in device.lower())
        path = tuned_folder(folder) / f"{name}{self._suffix}"
        with self._lock:
            if path not in self._made:
                self._made[path] = self._make(path)
            return self._made[path]

"""Files that outlive the process: the folder of compiled kernels and measured choices, whole writes, entries by key."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import functools
import itertools
import json
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

from typing_extensions import Self  # PyTorch needs it too

from te_fuser.config import config

_given_up: set[Path] = set()
_giving_up = threading.Lock()


def user_cache_dir() -> Path:
    """te_fuser's folder in the user's cache folder, where `config.cache_dir` is not set."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "te_fuser"
    except RuntimeError as error:  # no HOME, and nobody of this number among the users
        return give_up(Path("~/.cache/te_fuser"), str(error))


def current(folder: Path) -> Path:
    """The folder; the one that is used instead, once it was given up."""
    return private_folder() if folder in _given_up else folder


def usable(folder: Path) -> Path:
    """The folder, made if it is missing; else the private one, if that can be."""
    if folder in _given_up:
        return private_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        return give_up(folder, error.strerror or str(error))
    return folder


def give_up(folder: Path, why: str) -> Path:
    """The private folder, for all that was to be kept in `folder` from now on; a warning says so, once."""
    with _giving_up:
        first = folder not in _given_up
        _given_up.add(folder)
    if first:
        warnings.warn(
            f"te_fuser keeps what it compiles in {private_folder()}, which ends with this process, because {folder} "
            f"cannot be used ({why}); set te_fuser.config.cache_dir to a folder that can",
            RuntimeWarning,
            stacklevel=2,
        )
    return private_folder()


@functools.cache
def private_folder() -> Path:
    """A temporary folder of this process alone, deleted when it ends; OSError when none can be made."""
    try:
        folder = tempfile.mkdtemp(prefix="te_fuser-")
    except OSError as error:
        what = f"no temporary folder can be made ({error.strerror}): set te_fuser.config.cache_dir"
        raise type(error)(error.errno, what) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


_SUFFIX = ".new"
_ABANDONED_AFTER = 3600  # seconds: no file takes that long to write
_numbers = itertools.count()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file by the user's umask: others see all of it, or what was there before."""
    new = path.with_name(f"{path.name}.{os.getpid()}.{next(_numbers)}{_SUFFIX}")
    try:
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666), "wb") as file:
            file.write(data)
        os.replace(new, path)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def abandoned(folder: Path) -> list[Path]:
    """Files left in a folder by processes that were killed while they wrote."""
    found = []
    for path in folder.glob(f"*{_SUFFIX}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER:
                found.append(path)
    return sorted(found)


Entries = dict[str, dict[str, Any]]
_files: dict[tuple[type[EntryFile], Path], EntryFile] = {}
_changing = threading.Lock()  # one for all files: threads of this process never lose each other's entries


class EntryFile:
    """The entries of one file; one that cannot be read, or is of another form, is empty."""

    form: ClassVar[int] = 1
    suffix: ClassVar[str] = ".json"

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._stamp: tuple[int, int] | None = None
        self._entries: Entries = {}

    @classmethod
    def of(cls, device: str, folder: Path | None = None) -> Self:
        """The file of a device, by its name; in the cache folder as it is set now if no other is given."""
        name = "".join(c if c.isalnum() else "-" for c in device.lower())
        path = tuned_folder(folder) / f"{name}{cls.suffix}"
        return _files.get((cls, path)) or _files.setdefault((cls, path), cls(path))  # type: ignore[return-value]

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
        """Change the entries as they are on disk now, so that what others wrote stays."""
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
    """Context in which a folder is locked; where it cannot be, entries may be lost."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)  # which lets the next one in


def tuned_folder(folder: Path | None = None) -> Path:
    """Folder of measured choices: `tuned` in the given or the cache folder."""
    if folder or config.cache_dir:
        return (folder or config.cache_dir) / "tuned"  # type: ignore[operator]
    home = user_cache_dir()
    with contextlib.suppress(OSError):  # they lay among the CPU's kernels once; what is at the new place counts more
        (home / "cpu" / "tuned").rename(home / "tuned")
    return home / "tuned"

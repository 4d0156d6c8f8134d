"""Files that other processes see whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from pathlib import Path

_SUFFIX = ".new"
_ABANDONED_AFTER = 3600  # seconds: no file takes that long to write
_numbers = itertools.count()


def write_whole(path: Path, data: bytes) -> None:
    """Write a file: others see all of it, or what was there before. Who may read it is up to the user's umask.

    Raises:
        OSError: when it cannot be written.
    """
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

"""Folder of compiled kernels and measured choices, and its replacement when nothing can be kept there."""

from __future__ import annotations

import atexit
import errno
import functools
import os
import shutil
import tempfile
import threading
import warnings
from pathlib import Path

_given_up: set[Path] = set()
_giving_up = threading.Lock()


def user_cache_dir() -> Path:
    """te_fuser's own folder in the user's cache folder, where things are kept unless `config.cache_dir` is set."""
    given = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(given) if given else Path.home() / ".cache") / "te_fuser"
    except RuntimeError as error:  # no HOME, and nobody of this number among the users
        return give_up(Path("~/.cache/te_fuser"), str(error))


def current(folder: Path) -> Path:
    """The folder; the one that is used instead, once it was given up."""
    return private_folder() if folder in _given_up else folder


def usable(folder: Path) -> Path:
    """The folder, made if it is missing; the private one where it cannot be written.

    Raises:
        OSError: when there is no private one either.
    """
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
    """The private folder, for all that was to be kept in `folder` from now on; a warning says so, once.

    Raises:
        OSError: when there is no private one either.
    """
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
    """A temporary folder of this process alone, deleted when it ends.

    Raises:
        OSError: when none can be made.
    """
    try:
        folder = tempfile.mkdtemp(prefix="te_fuser-")
    except OSError as error:
        what = f"no temporary folder can be made ({error.strerror}): set te_fuser.config.cache_dir"
        raise type(error)(error.errno, what) from error
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)

"""Libraries in C that tests put in place of real ones, compiled once by each process."""

from __future__ import annotations

import atexit
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

_FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


@functools.cache
def compiled(source: str, *flags: str) -> Path:
    """The library of a file beside this one; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    text = Path(__file__).with_name(source)
    made = temporary_folder() / f"{text.stem}.so"
    # Behind the text, as the linker takes libraries for what stands before them.
    subprocess.run([compiler, *_FLAGS, str(text), *flags, "-o", str(made)], check=True)
    return made


@functools.cache
def temporary_folder() -> Path:
    """A folder that ends with the process."""
    folder = Path(tempfile.mkdtemp(prefix="te_fuser_tests"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder

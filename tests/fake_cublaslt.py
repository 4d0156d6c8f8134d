"""A cuBLASLt for tests on machines without a GPU: `fake_cublaslt.c`, which computes on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from te_fuser import _native


class FakeCublasLt(ctypes.Structure):
    """What the library counts and can be told; the fields are those of `fake_state`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("heuristics", "products", "refused", "refused_algorithm")),
        *((name, ctypes.c_int) for name in ("last_epilogue", "last_compute")),
        ("by_algorithm", ctypes.c_int * 4),
        ("last_workspace", ctypes.c_longlong),
        ("last_workspace_at", ctypes.c_void_p),
        ("last_fast", ctypes.c_int),
        ("any_layout", ctypes.c_int),
    ]


def compile_library(folder: Path) -> Path:
    """The library; skips the test where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no C compiler")
    library = folder / "fake_cublaslt.so"
    source = Path(__file__).with_name("fake_cublaslt.c")
    flags = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library), "-lm"], check=True)
    return library


@contextlib.contextmanager
def in_place(library: Path) -> Iterator[FakeCublasLt]:
    """Run with this library; a driver must be in place, too."""
    state = FakeCublasLt.in_dll(ctypes.CDLL(str(library)), "fake")
    ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
    _native.set_cublaslt(str(library))
    try:
        yield state
    finally:
        _native.set_cublaslt("")

"""A cuBLASLt for tests on machines without a GPU: `fake_cublaslt.c`, which computes on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

from te_fuser import _native
from te_fuser.kernels.cublaslt import products
from tests.c_library import compiled


class FakeCublasLt(ctypes.Structure):
    """Counters and settings of the library; the fields are those of `fake_state`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("heuristics", "products", "refused", "refused_algorithm")),
        *((name, ctypes.c_int) for name in ("last_epilogue", "last_compute")),
        ("by_algorithm", ctypes.c_int * 4),
        ("last_workspace", ctypes.c_longlong),
        ("last_workspace_at", ctypes.c_void_p),
        ("last_fast", ctypes.c_int),
        ("any_layout", ctypes.c_int),
    ]

    def algorithms_of(self, call: Callable[[], object]) -> list[int]:
        """Algorithms that a call runs, numbered from 1."""
        self.by_algorithm[:] = [0] * 4
        call()
        return [k for k in range(4) for _ in range(self.by_algorithm[k])]


def compile_library() -> Path:
    """The library, which a process compiles once; skips the test where there is no C compiler."""
    return compiled("fake_cublaslt.c", "-O2", "-lm")


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


def a_new_process() -> None:
    """Forget all products, and with them the problems of a library before."""
    for configured in (products.configured, products.product_of):
        configured.cache_clear()
    products.in_use.clear()

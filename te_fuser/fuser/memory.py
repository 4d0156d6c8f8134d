"""Large CPU tensors in huge pages.

The C library gives blocks beyond 32 MiB back to the system as soon as they are free, so that each large tensor is made
of pages that were never touched. A page fault for each 4 KiB of it takes longer than the kernel that fills it.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable

import torch

LARGE = 32 * 2**20  # bytes; glibc's largest threshold for giving back
_PAGE = 4096
_MADV_HUGEPAGE = 14


def prefer_huge_pages(t: torch.Tensor) -> None:
    """Ask the system for 2 MiB pages under a tensor that nobody has written to yet; only a hint, and only if large."""
    madvise = _madvise()
    if madvise is None or t.nbytes < LARGE or t.device.type != "cpu":
        return
    start = -(-t.data_ptr() // _PAGE) * _PAGE
    madvise(start, (t.data_ptr() + t.nbytes - start) // _PAGE * _PAGE, _MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Callable[[int, int, int], int] | None:
    """The system's call; None where there is none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        call = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call

"""What a CUDA kernel that is written by hand must offer to be compiled and loaded beside the generated ones."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

Made = TypeVar("Made")


class Loadable(Protocol):
    """A native kernel."""

    def load(self, device: int) -> None:
        """Load on a device; nothing happens where it is loaded already."""


class WrittenKernel(Hashable, Protocol):
    """A kernel with its own text, for one setting of the text's constants; equal ones are one kernel."""

    @property
    def name(self) -> str:
        """What errors and the refusal of a captured stream call it."""

    def compile(self, arch: str, cache: Path | None) -> Loadable:
        """The kernel for an architecture such as "sm_90a"; another call gives the same one, whatever the folder.

        Args:
            cache: the folder for machine code; that of the user's cache if not given.

        Raises:
            CompilerMissing, CompileError: from NVRTC.
        """


class MadeOnce(Generic[Made]):
    """make(kernel, architecture, folder for machine code) once in a process for each kernel and architecture.

    A program that was planned holds what was made then, so the folder of a later call must not bring another one.
    """

    def __init__(self, make: Callable[[Any, str, Path | None], Made]) -> None:
        self._make = make
        self._made: dict[tuple[Any, str], Made] = {}
        self._lock = threading.Lock()

    def __call__(self, kernel: Hashable, arch: str, cache: Path | None) -> Made:
        found = self._made.get((kernel, arch))
        if found is None:  # made outside the lock: several kernels compile at the same time
            made = self._make(kernel, arch, cache)
            with self._lock:
                found = self._made.setdefault((kernel, arch), made)
        return found

    def cache_clear(self) -> None:
        """Forget all of them."""
        self._made.clear()

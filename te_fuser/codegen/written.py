"""What a CUDA kernel that is written by hand must offer to be compiled and loaded beside the generated ones."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Protocol


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
        """The kernel for an architecture such as "sm_90a"; another call gives the same one.

        Args:
            cache: the folder for machine code; that of the user's cache if not given.

        Raises:
            CompilerMissing, CompileError: from NVRTC.
        """


__all__ = ["Loadable", "WrittenKernel"]

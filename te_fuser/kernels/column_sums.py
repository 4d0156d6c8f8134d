"""The kernel that adds up the partial sums of several kernels at once, at the end of a program."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch

from te_fuser import _native
from te_fuser.codegen import nvrtc
from te_fuser.codegen.written import MadeOnce
from te_fuser.config import config


def column_sums(device: torch.device) -> _native.ColumnSums:
    """The kernel, loaded on a CUDA device.

    Raises:
        CompilerMissing, CompileError: from NVRTC.
        RuntimeError: when the driver refuses it.
    """
    arch = nvrtc.arch_of(torch.cuda.get_device_capability(device))
    found = ColumnSumsKernel().compile(arch, config.cache_dir)
    found.load(torch.cuda.current_device() if device.index is None else device.index)
    return found


@dataclass(frozen=True)
class ColumnSumsKernel:
    """The kernel as plans compile it beside their generated ones."""

    name: str = "column_sums"

    def compile(self, arch: str, cache: Path | None) -> _native.ColumnSums:
        """The kernel for an architecture; made once in a process."""
        return _kernel(self, arch, cache)


@functools.cache
def text() -> str:
    """The CUDA text."""
    return Path(__file__).with_suffix(".cu").read_text()


@MadeOnce
def _kernel(kernel: ColumnSumsKernel, arch: str, cache: Path | None) -> _native.ColumnSums:
    return _native.ColumnSums(nvrtc.compile_source(text(), arch, name=kernel.name, cache=cache).cubin)

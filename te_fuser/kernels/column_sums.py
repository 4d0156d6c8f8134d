"""The kernel that adds up the partial sums of several kernels at once, at the end of a program."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from te_fuser import _native
from te_fuser.codegen import nvrtc
from te_fuser.config import config


def column_sums(device: torch.device) -> _native.ColumnSums:
    """The kernel, loaded on a CUDA device.

    Raises:
        CompilerMissing, CompileError: from NVRTC.
        RuntimeError: when the driver refuses it.
    """
    found = _kernel(nvrtc.arch_of(torch.cuda.get_device_capability(device)))
    found.load(torch.cuda.current_device() if device.index is None else device.index)
    return found


@functools.cache
def text() -> str:
    """The CUDA text."""
    return Path(__file__).with_suffix(".cu").read_text()


@functools.cache
def _kernel(arch: str) -> _native.ColumnSums:
    return _native.ColumnSums(nvrtc.compile_source(text(), arch, name="column_sums", cache=config.cache_dir).cubin)

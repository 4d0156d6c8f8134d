"""Kernels of tests/cpu_kernels.c, and their calls."""

from __future__ import annotations

import torch

from te_fuser import _native


def scale_kernel(library: str, features: int) -> _native.CpuKernel:
    return _native.CpuKernel(library, "scale", ("float32",) * 3, features, 0, features, features)


def where_kernel(library: str) -> _native.CpuKernel:
    return _native.CpuKernel(library, "where", ("int64", "int64"), 0, 0, 0, 32768)


def touch_kernel(library: str, *dtypes: str) -> _native.CpuKernel:
    return _native.CpuKernel(library, "touch", dtypes, 0, 0, 0, 1)


def run_scale(kernel: _native.CpuKernel, x: torch.Tensor, factor: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    rows, features = x.shape
    y, sums = torch.full_like(x, torch.nan), torch.full((features,), torch.nan)
    kernel((x, y, sums), rows, 1, max(rows, 1), (features, factor))
    return y, sums


def run_where(kernel: _native.CpuKernel, rows: int) -> tuple[list[int], list[int]]:
    workers, threads = torch.full((rows,), -1), torch.full((rows,), -1)
    kernel((workers, threads), rows, 1, 1, ())
    return workers.tolist(), threads.tolist()

"""A description's text and machine code together, with as many registers for a thread as it turns out to need."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from te_fuser.codegen import cuda, nvrtc
from te_fuser.codegen.cuda import CudaKernel
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.codegen.schedule import Schedule

_HARMLESS = 16  # bytes that a thread may spill: four registers cost less than a block fewer on each multiprocessor
_ATTEMPTS = 4


def compile_kernel(
    description: KernelDescription, arch: str, *, schedules: Sequence[Schedule] = (), cache: Path | None = None
) -> tuple[CudaKernel, Compiled]:
    """The kernel of a description, compiled.

    How many registers a text needs is an estimate. Where the assembler has to spill, fewer blocks for each
    multiprocessor leave more of them for each thread. Schedules that are given are taken as they are.

    Raises:
        CompilerMissing, CompileError: from NVRTC.
        ValueError: for a tensor in a dtype that generated kernels do not store.
    """
    kernel = cuda.generate(description, arch, schedules=schedules)
    code = nvrtc.compile_source(kernel.source, arch, name=description.name, cache=cache)
    found = [(kernel, code)]
    while not schedules and len(found) < _ATTEMPTS:
        kernel, code = found[-1]
        roomier = tuple(
            _roomier(s) if spilled > _HARMLESS else s
            for s, spilled in zip(kernel.schedules, _spilled(kernel, code), strict=True)
        )
        if roomier == kernel.schedules:
            break
        kernel = cuda.generate(description, arch, schedules=roomier)
        found.append((kernel, nvrtc.compile_source(kernel.source, arch, name=description.name, cache=cache)))
    return min(found, key=lambda each: max(0, sum(_spilled(*each)) - _HARMLESS))


def _spilled(kernel: CudaKernel, code: Compiled) -> list[int]:
    """Bytes that a thread of each schedule's launch spills; an older NVRTC gives no report, which counts as none."""
    by_symbol = {r.symbol: r.spilled_bytes for r in code.resources}
    return [by_symbol.get(launch.symbol, 0) for launch, _ in zip(kernel.launches, kernel.schedules, strict=False)]


def _roomier(s: Schedule) -> Schedule:
    blocks = s.blocks_per_multiprocessor
    return dataclasses.replace(s, blocks_per_multiprocessor=max(1, min(blocks - 1, round(0.8 * blocks))))

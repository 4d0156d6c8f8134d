"""A description's text and machine code together, with as many registers for a thread as it turns out to need."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from pathlib import Path

from te_fuser.codegen import cuda, nvrtc, schedule_model
from te_fuser.codegen.cuda import CudaKernel
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.codegen.schedule import Schedule, limits_of

_HARMLESS = 16  # bytes that a thread may spill: four registers cost less than a block fewer on each multiprocessor
_BEARABLE = 64  # and what costs less than a schedule that the model ranks lower, or than reading the inputs twice
_ATTEMPTS = 4
_OTHERS = 3  # forms of a schedule to try, in one kernel and in two

Made = tuple[CudaKernel, Compiled]


def compile_kernel(
    description: KernelDescription, arch: str, *, schedules: Sequence[Schedule] = (), cache: Path | None = None
) -> Made:
    """The kernel of a description, compiled.

    How many registers a text needs is an estimate. Where the assembler has to spill, fewer blocks for each
    multiprocessor leave more of them for each thread; where that is not enough, the first other schedule that spills
    little is taken, or the one that spills least. The same compiler finds the same schedule each time. One that does
    stores and column sums apart overwrites nothing, whatever the description allows. Schedules that are given are
    taken as they are.

    Raises:
        CompilerMissing, CompileError: from NVRTC.
        ValueError: for a tensor in a dtype that generated kernels do not store.
    """
    if schedules:
        return _compiled(description, arch, schedules, cache)
    found = [_with_room(description, arch, (), cache)]
    if _bytes(found[0]) <= _BEARABLE:
        return found[0]
    # Schedules of other forms, the best first: in one kernel, then with the column sums in their own.
    rewritten, limits, tried = rewrite(description), limits_of(arch), found[0][0].schedules
    whole = [(s,) for s in schedule_model.candidates(rewritten, limits)]
    apart = schedule_model.apart(rewritten, limits)
    for others in (*_other_forms(whole, tried), *_other_forms(apart, tried)):
        found.append(_with_room(description, arch, others, cache))
        if _bytes(found[-1]) <= _BEARABLE:
            return found[-1]
    return min(found, key=_bytes)


def _with_room(description: KernelDescription, arch: str, schedules: Sequence[Schedule], cache: Path | None) -> Made:
    """The kernel with these schedules, or with the picked ones, and as few blocks as its registers ask for."""
    found = [_compiled(description, arch, schedules, cache)]
    while len(found) < _ATTEMPTS:
        kernel, _ = found[-1]
        roomier = []
        for s, spilled in zip(kernel.schedules, _spilled(*found[-1]), strict=True):
            blocks = s.blocks_per_multiprocessor
            fewer = max(1, min(blocks - 1, round(0.8 * blocks))) if spilled > _HARMLESS else blocks
            roomier.append(dataclasses.replace(s, blocks_per_multiprocessor=fewer))
        if roomier == list(kernel.schedules):
            break
        found.append(_compiled(description, arch, roomier, cache))
    return min(found, key=lambda made: max(0, _bytes(made) - _HARMLESS))


def _compiled(description: KernelDescription, arch: str, schedules: Sequence[Schedule], cache: Path | None) -> Made:
    kernel = cuda.generate(description, arch, schedules=schedules)
    return kernel, nvrtc.compile_source(kernel.source, arch, name=description.name, cache=cache)


def _other_forms(listed: Iterable[tuple[Schedule, ...]], tried: tuple[Schedule, ...]) -> list[tuple[Schedule, ...]]:
    """The first of each form but that of `tried`: of these a few of the best, and the last, which holds least."""
    found: dict[tuple[Schedule, ...], tuple[Schedule, ...]] = {}
    for schedules in listed:
        found.setdefault(_form(schedules), schedules)
    found.pop(_form(tried), None)
    firsts = list(found.values())
    return [*firsts[:_OTHERS], *firsts[_OTHERS:][-1:]]


def _form(schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """The schedules without their numbers of blocks: the key by which those of one form are found."""
    return tuple(dataclasses.replace(s, blocks_per_multiprocessor=1) for s in schedules)


def _bytes(made: Made) -> int:
    return sum(_spilled(*made))


def _spilled(kernel: CudaKernel, code: Compiled) -> list[int]:
    """Bytes that a thread of each schedule's launch spills; an older NVRTC gives no report, which counts as none."""
    by_symbol = {r.symbol: r.spilled_bytes for r in code.resources}
    return [by_symbol.get(launch.symbol, 0) for launch, _ in zip(kernel.launches, kernel.schedules, strict=False)]

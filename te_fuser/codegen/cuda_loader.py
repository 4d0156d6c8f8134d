"""From kernel descriptions to callable kernels on a GPU: generated text, NVRTC in parallel threads, the native runtime.

A text gets as many registers for a thread as it turns out to need. What this process has made is used again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.codegen import cuda, nvrtc, schedule_model
from te_fuser.codegen.cuda import CudaKernel
from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.cuda_source_kernel import Loadable, WrittenKernel, arch_on, index_of
from te_fuser.codegen.description import (
    PLACES,
    KernelDescription,
    Load,
    Maximum,
    Store,
    Sum,
    is_in_blocks,
    is_transposed,
    item_size,
)
from te_fuser.codegen.nvrtc import Compiled
from te_fuser.codegen.progress import Progress
from te_fuser.codegen.schedule import Schedule, limits_of
from te_fuser.codegen.tuned_schedules import store_for
from te_fuser.formula.expr import Axes

if TYPE_CHECKING:
    from te_fuser import _native


_HARMLESS = 16  # bytes that a thread may spill: four registers cost less than a block fewer on each multiprocessor
_BEARABLE = 64  # and what costs less than a schedule that the model ranks lower, or than reading the inputs twice
_ATTEMPTS = 4
_OTHERS = 3  # forms of a schedule to try, in one kernel and in two

Made = tuple[CudaKernel, Compiled]


def compile_kernel(
    description: KernelDescription, arch: str, *, schedules: Sequence[Schedule] = (), cache: Path | None = None
) -> Made:
    """The kernel of a description, compiled, with the given schedules or the model's.

    How many registers a text needs is an estimate. Where the assembler has to spill, fewer blocks for each
    multiprocessor leave more for each thread; then the first other schedule that spills little is taken, or the one
    that spills least: the same compiler finds the same one each time. Stores apart from column sums overwrite nothing.
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
    """The kernel with these schedules, or the picked ones, and blocks as its registers ask."""
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
    """The first of each form but that of `tried`: a few of the best, and the last, which holds least."""
    found: dict[tuple[Schedule, ...], tuple[Schedule, ...]] = {}
    for schedules in listed:
        found.setdefault(_form(schedules), schedules)
    found.pop(_form(tried), None)
    firsts = list(found.values())
    return [*firsts[:_OTHERS], *firsts[_OTHERS:][-1:]]


def _form(schedules: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    return tuple(dataclasses.replace(s, blocks_per_multiprocessor=1) for s in schedules)


def _bytes(made: Made) -> int:
    return sum(_spilled(*made))


def _spilled(kernel: CudaKernel, code: Compiled) -> list[int]:
    """Bytes that a thread of each schedule's launch spills; without a report none."""
    by_symbol = {r.symbol: r.spilled_bytes for r in code.resources}
    return [by_symbol.get(launch.symbol, 0) for launch, _ in zip(kernel.launches, kernel.schedules, strict=False)]


_SEED_DTYPE, _RAISED_DTYPE = "int64", "float32"
_NUMBERS = ("seed_value", "seed_offset", "rows", "batch_inner", "batch_size", "groups")  # what a call has once
_WIDEST_ACCESS = 16  # bytes


@dataclass(frozen=True)
class GpuKernel:
    """A kernel that is ready to run: `run` is the native one, the rest is to be looked at."""

    description: KernelDescription
    text: CudaKernel
    resources: tuple[nvrtc.Resources, ...]
    run: _native.CudaKernel


def load(
    descriptions: Sequence[KernelDescription],
    device: torch.device,
    *,
    rows: Mapping[str, int] | None = None,
    cache_dir: Path | None = None,
    written: Iterable[WrittenKernel] = (),
) -> list[GpuKernel]:
    """The kernels for these descriptions on a CUDA device, in their order, loaded and ready for a captured stream.

    Each has the schedule that was measured to be the best (`tuned_schedules`), else the one that the model picks.

    Args:
        rows: description key -> about how many rows that kernel will have; it selects among measured schedules.
        cache_dir: the folder for machine code and measured schedules; the user's cache folder if not given.
        written: kernels written by hand that are to be compiled beside these, and loaded.

    Raises:
        CompilerMissing, CompileError: from NVRTC; an error in a kernel's text names the kernel and shows the line.
        RuntimeError: when one is still to be made while the stream is captured, or the driver refuses it.
        ValueError: for a description that generated kernels do not cover, such as one with float64.
    """
    index = index_of(device)
    wanted = {d.key: (d, measured(d, device, (rows or {}).get(d.key), cache_dir)) for d in descriptions}
    made = dict(zip(wanted, _load(list(wanted.values()), index, cache_dir, written), strict=True))
    return [made[d.key] for d in descriptions]


def variants(description: KernelDescription, device: torch.device, most: int = 24) -> list[tuple[Schedule, ...]]:
    """Schedules that are worth measuring for a kernel on a CUDA device, the one that the model picks first.

    Each is what `load_variant` and `TunedSchedules.put` take: one schedule, or two for stores and sums apart.
    """
    return schedule_model.variants(rewrite(description), limits_of(arch_on(index_of(device))), most)


def load_variant(
    description: KernelDescription,
    device: torch.device,
    schedules: Sequence[Schedule],
    *,
    cache_dir: Path | None = None,
) -> GpuKernel:
    """The kernel with these schedules, else as `load`; ValueError where they do not fit."""
    index = index_of(device)
    reason = _misfit(description, tuple(schedules), index)
    if reason:
        raise ValueError(f"kernel {description.name}: {reason}")
    (kernel,) = _load([(description, tuple(schedules))], index, cache_dir)
    return kernel


def loaded() -> list[GpuKernel]:
    with _lock:
        return list(_made.values())


Wanted = tuple[KernelDescription, tuple[Schedule, ...]]  # no schedule: the model's choice
_lock = threading.RLock()
_made: dict[tuple[str, str, tuple[Schedule, ...]], GpuKernel] = {}  # by description, architecture, schedules
_ready: set[tuple[str, str, tuple[Schedule, ...], int]] = set()  # what is loaded on which device
_written: set[tuple[WrittenKernel, int]] = set()  # those by hand, in the same way


def measured(
    description: KernelDescription, device: torch.device, rows: int | None, cache_dir: Path | None = None
) -> tuple[Schedule, ...]:
    """The schedules that were measured to be the best and still fit."""
    index = index_of(device)
    found = store_for(torch.cuda.get_device_name(index), cache_dir).find(description.key, rows)
    return () if found and _misfit(description, found, index) else found


def _misfit(description: KernelDescription, schedules: tuple[Schedule, ...], index: int) -> str:
    return schedule_model.misfit(rewrite(description), schedules, limits_of(arch_on(index)))


def _load(
    wanted: Sequence[Wanted], index: int, cache_dir: Path | None, written: Iterable[WrittenKernel] = ()
) -> list[GpuKernel]:
    arch = arch_on(index)
    with _lock:
        missing = [(d, s) for d, s in wanted if (d.key, arch, s, index) not in _ready]
        by_hand = [k for k in dict.fromkeys(written) if (k, index) not in _written]
        if (missing or by_hand) and _is_capturing(index):
            names = ", ".join(sorted({*(d.name for d, _ in missing), *(k.name for k in by_hand)}))
            raise RuntimeError(
                f"this call needs kernels that are not there yet ({names}), and its stream is being captured into a "
                "CUDA graph: run the model once with inputs like these before the capture"
            )
        made_by_hand = _make_all(missing, by_hand, arch, cache_dir)
        for d, s in missing:
            _made[d.key, arch, s].run.load(index)
            _ready.add((d.key, arch, s, index))
        for k, kernel in zip(by_hand, made_by_hand, strict=True):
            kernel.load(index)
            _written.add((k, index))
        return [_made[d.key, arch, s] for d, s in wanted]


def _is_capturing(index: int) -> bool:
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


def _make_all(
    wanted: Sequence[Wanted], written: Sequence[WrittenKernel], arch: str, cache_dir: Path | None
) -> list[Loadable]:
    new = [(d, s) for d, s in wanted if (d.key, arch, s) not in _made]

    def make(description: KernelDescription, schedules: tuple[Schedule, ...]) -> GpuKernel:
        text, code = compile_kernel(description, arch, schedules=schedules, cache=cache_dir)
        return GpuKernel(description, text, code.resources, native_kernel(description, text, code.cubin))

    jobs: list[Callable[[], Any]] = [functools.partial(make, d, s) for d, s in new]
    jobs += [functools.partial(k.compile, arch, cache_dir) for k in written]
    made = _in_parallel(jobs, arch)
    _made.update({(d.key, arch, s): kernel for (d, s), kernel in zip(new, made, strict=False)})
    return made[len(new) :]


def _in_parallel(jobs: Sequence[Callable[[], Any]], arch: str) -> list[Any]:
    if not jobs:
        return []
    total, started = len(jobs), list[Future[Any]]()

    def state() -> str:
        return f" ({sum(job.done() for job in started)} of {total} so far)"

    what = f"compiling {total} kernel{'s' if total > 1 else ''} for {arch}"
    with Progress(what, state), ThreadPoolExecutor(min(total, os.cpu_count() or 1)) as pool:
        started.extend(pool.submit(job) for job in jobs)
        return [job.result() for job in started]


# --------------------------------------------------------------------------------- for the native runtime


def native_kernel(description: KernelDescription, text: CudaKernel, cubin: bytes) -> _native.CudaKernel:
    """The kernel as the native runtime takes it; nothing is loaded yet, and no driver is needed."""
    from te_fuser import _native

    read: list[Load | Maximum | None] = [*description.loads, *description.maxima]
    read += [None] if description.streams else []
    tensors = (*read, *description.outputs)
    places, launches = _places(description, text), []
    for launch in text.launches:
        arguments = tuple(places[p.kind, p.name] for p in launch.parameters)
        launches.append((launch.symbol, launch.threads, launch.shared_bytes, launch.grid, arguments))
    return _native.CudaKernel(
        description.name,
        cubin,
        tuple(_RAISED_DTYPE if isinstance(t, Maximum) else t.dtype if t else _SEED_DTYPE for t in tensors),
        tuple(_alignment(t, text) for t in tensors),
        len(read),
        tuple(launches),
        tuple(p.width for p in text.partials),
        len(text.row_values),
        description.integers,
        waits=True,
        overwrites=tuple((places["store", store][1], places["load", load][1]) for store, load in text.overwrites),
    )


Place = tuple[str, int]


def _places(description: KernelDescription, text: CudaKernel) -> dict[tuple[str, str], Place]:
    """(kind, name) of a parameter -> where the runtime finds it."""
    d = description
    kinds = [("load", t.name) for t in d.loads] + [("maximum", t.name) for t in d.maxima]
    kinds += [("seed", "seed")] if d.streams else []
    kinds += [("store", t.name) for t in d.stores] + [("sum", t.name) for t in d.sums]
    found: dict[tuple[str, str], Place] = {key: ("tensor", k) for k, key in enumerate(kinds)}
    found |= {("partial", p.name): ("partial", k) for k, p in enumerate(text.partials)}
    found |= {("row_value", name): ("row_value", k) for k, name in enumerate(text.row_values)}
    found |= {("stream", name): ("integer", k) for k, name in enumerate(d.streams)}
    found |= {("place", name): ("integer", k) for k, name in enumerate(PLACES, len(d.streams))}
    return found | {(name, name): (name, 0) for name in _NUMBERS}


def _alignment(tensor: Load | Maximum | Store | Sum | None, text: CudaKernel) -> int:
    """Bytes that the tensor must be aligned to: those of one access to it."""
    if isinstance(tensor, Maximum):
        return item_size(_RAISED_DTYPE)
    if tensor is None:
        return item_size(_SEED_DTYPE)
    size = item_size(tensor.dtype)
    if isinstance(tensor, Sum) or not tensor.axes & Axes.FEATURE:
        return size
    if is_transposed(tensor) or is_in_blocks(tensor):
        return _WIDEST_ACCESS
    return min(_WIDEST_ACCESS, size * max(s.vector for s in text.schedules))

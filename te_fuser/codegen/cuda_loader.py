"""From kernel descriptions to callable kernels on a GPU: generated text, NVRTC in parallel threads, the native runtime.

What this process has made once is used again; machine code is also kept on disk (see `nvrtc`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from te_fuser.codegen import cuda, nvrtc
from te_fuser.codegen.cuda import CudaKernel, CudaLaunch, RowGrid
from te_fuser.codegen.description import KernelDescription, Load, Store, Sum, item_size
from te_fuser.formula.expr import Axes

if TYPE_CHECKING:
    from te_fuser import _native

_PATIENCE = 1.0  # seconds without a word
_SEED_DTYPE = "int64"
_WIDEST_ACCESS = 16  # bytes


@dataclass(frozen=True)
class GpuKernel:
    """A kernel that is ready to run: `run` is the native kernel itself, the rest is for those who look inside."""

    description: KernelDescription
    text: CudaKernel
    resources: tuple[nvrtc.Resources, ...]
    run: _native.CudaKernel


def load(
    descriptions: Sequence[KernelDescription], device: torch.device, *, cache_dir: Path | None = None
) -> list[GpuKernel]:
    """The kernels for these descriptions on a CUDA device, in their order, loaded and ready for a captured stream.

    Raises:
        CompilerMissing, CompileError: from NVRTC; an error in a kernel's text names the kernel and shows the line.
        RuntimeError: when something is still to be made and the current stream is being captured, or when the driver
            refuses a kernel.
        ValueError: for a description that generated kernels do not cover, such as one with float64.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    arch = nvrtc.arch_of(torch.cuda.get_device_capability(index))
    with _lock:
        missing = {d.key: d for d in descriptions if (d.key, arch, index) not in _ready}
        if missing:
            _refuse_capture(missing.values(), index)
            _made.update(_make({k: d for k, d in missing.items() if (k, arch) not in _made}, arch, cache_dir))
        for key in missing:
            _made[key, arch].run.load(index)
            _ready.add((key, arch, index))
        return [_made[d.key, arch] for d in descriptions]


_lock = threading.RLock()
_made: dict[tuple[str, str], GpuKernel] = {}  # by description and architecture
_ready: set[tuple[str, str, int]] = set()  # what is loaded on which device


def _refuse_capture(missing: Iterable[KernelDescription], index: int) -> None:
    if not _is_capturing(index):
        return
    names = ", ".join(sorted({d.name for d in missing}))
    raise RuntimeError(
        f"this call needs kernels that are not there yet ({names}), and its stream is being captured into a CUDA "
        "graph: run the model once with inputs like these before the capture"
    )


def _is_capturing(index: int) -> bool:
    with torch.cuda.device(index):
        return torch.cuda.is_current_stream_capturing()


# ------------------------------------------------------------------------------------------------- compiling


def _make(
    wanted: Mapping[str, KernelDescription], arch: str, cache_dir: Path | None
) -> dict[tuple[str, str], GpuKernel]:
    """Generate and compile; a text is on its way to the compiler while the next one is written."""
    if not wanted:
        return {}
    with _Progress(len(wanted), arch) as progress, ThreadPoolExecutor(min(len(wanted), os.cpu_count() or 1)) as pool:
        started = []
        for description in wanted.values():
            text = cuda.generate(description, arch)
            job = pool.submit(nvrtc.compile_source, text.source, arch, name=description.name, cache=cache_dir)
            job.add_done_callback(progress.count)
            started.append((description, text, job))
        compiled = [(description, text, job.result()) for description, text, job in started]
    return {
        (d.key, arch): GpuKernel(d, text, code.resources, native_kernel(d, text, code.cubin))
        for d, text, code in compiled
    }


class _Progress:
    """Says on stderr what is being waited for, when it takes long."""

    def __init__(self, total: int, arch: str) -> None:
        self._what = f"te_fuser: compiling {total} kernel{'s' if total > 1 else ''} for {arch}"
        self._total, self._done, self._said = total, 0, False
        self._started = time.monotonic()
        self._timer = threading.Timer(_PATIENCE, self._say)
        self._timer.daemon = True

    def __enter__(self) -> _Progress:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._said:
            how = "failed" if kind else "done"
            print(f"{self._what}: {how} after {time.monotonic() - self._started:.1f} s", file=sys.stderr, flush=True)

    def _say(self) -> None:
        self._said = True
        print(f"{self._what} ({self._done} of {self._total} so far) ...", file=sys.stderr, flush=True)

    def count(self, job: object) -> None:
        """One more is finished."""
        self._done += 1


# --------------------------------------------------------------------------------- for the native runtime


def native_kernel(description: KernelDescription, text: CudaKernel, cubin: bytes) -> _native.CudaKernel:
    """The kernel as the native runtime takes it; nothing is loaded yet, and no driver is needed."""
    from te_fuser import _native

    read: list[Load | None] = [*description.loads, *([None] if description.streams else [])]
    written: list[Store | Sum] = [*description.stores, *description.sums]
    return _native.CudaKernel(
        description.name,
        cubin,
        tuple(t.dtype if t else _SEED_DTYPE for t in (*read, *written)),
        tuple(_alignment(t, text) for t in (*read, *written)),
        len(read),
        tuple(_launch(launch, _places(description, text)) for launch in text.launches),
        tuple(p.width for p in text.partials),
        len(text.row_values),
        len(description.streams),
    )


Place = tuple[str, int]


def _places(description: KernelDescription, text: CudaKernel) -> dict[tuple[str, str], Place]:
    """(kind, name) of a parameter -> where the runtime finds it: tensors are the loads, the seed, stores and sums."""
    d = description
    kinds = [("load", t.name) for t in d.loads]
    kinds += [("seed", "seed")] if d.streams else []
    kinds += [("store", t.name) for t in d.stores] + [("sum", t.name) for t in d.sums]
    found: dict[tuple[str, str], Place] = {key: ("tensor", k) for k, key in enumerate(kinds)}
    found |= {("partial", p.name): ("partial", k) for k, p in enumerate(text.partials)}
    found |= {("row_value", name): ("row_value", k) for k, name in enumerate(text.row_values)}
    found |= {("stream", name): ("integer", k) for k, name in enumerate(d.streams)}
    return found | {(name, name): (name, 0) for name in ("rows", "batch_inner", "batch_size", "groups")}


def _launch(launch: CudaLaunch, places: Mapping[tuple[str, str], Place]) -> _native.CudaLaunch:
    grid = launch.grid
    blocks: tuple[int, int] | tuple[int, int, int, bool, bool]
    if isinstance(grid, RowGrid):
        blocks = (grid.tiles, grid.rows_per_block, grid.blocks_per_multiprocessor, grid.per_sample, grid.sums)
    else:
        blocks = (grid.fixed, grid.per_sample)
    arguments = tuple(places[p.kind, p.name] for p in launch.parameters)
    return launch.symbol, launch.threads, launch.shared_bytes, blocks, arguments


def _alignment(tensor: Load | Store | Sum | None, text: CudaKernel) -> int:
    """Bytes that the tensor must be aligned to: those of one access to it."""
    if tensor is None:
        return item_size(_SEED_DTYPE)
    size = item_size(tensor.dtype)
    if isinstance(tensor, Sum) or not tensor.axes & Axes.FEATURE:
        return size
    return min(_WIDEST_ACCESS, size * max(s.vector for s in text.schedules))


__all__: Sequence[str] = ("GpuKernel", "load", "native_kernel")

"""A CUDA driver for tests on machines without a GPU: `fake_cuda.c`, and generated kernels that it runs on the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from te_fuser import _native
from te_fuser.codegen import cuda, cuda_loader, cuda_source_kernel
from te_fuser.codegen.cuda_loader import native_kernel
from te_fuser.codegen.cuda_source_kernel import Loadable, TextKernel
from te_fuser.codegen.description import KernelDescription
from te_fuser.config import config
from te_fuser.fuser import pipeline
from te_fuser.fuser.run import loading
from te_fuser.kernels import packed_heads
from tests.c_library import compiled
from tests.codegen import cuda_on_cpu

REAL_DRIVER = "libcuda.so.1"
_SYMBOL = re.compile(r'extern "C" __global__ void __launch_bounds__\([^)]*\)\s*(\w+)')
CXX = shutil.which("g++") or shutil.which("clang++")


def capture_by(patch: pytest.MonkeyPatch, graphed: Callable[..., Any]) -> list[str]:
    """Models are captured by a function in place of PyTorch's; the streams that are set."""
    streams: list[str] = []
    patch.setattr("te_fuser.capture._check_devices", lambda model, samples: None)
    patch.setattr(torch.cuda, "make_graphed_callables", graphed)
    patch.setattr(torch.cuda, "current_stream", lambda: "the caller's")
    patch.setattr(torch.cuda, "set_stream", streams.append)
    return streams


class FakeDriver(ctypes.Structure):
    """Counters and settings of the driver; the fields are those of `fake_state`."""

    _fields_ = [
        *((name, ctypes.c_int) for name in ("devices", "multiprocessors", "capability", "capturing", "failing")),
        *((name, ctypes.c_int) for name in ("loads", "launches", "early", "copies", "pushes", "pops")),
        *((name, ctypes.c_uint) for name in ("last_blocks", "last_threads", "last_shared_bytes")),
        ("last_symbol", ctypes.c_char * 256),
        ("delay", ctypes.c_int),
    ]


def compile_driver() -> Path:
    """The driver as a library, which a process compiles once; skips the test where there is no C compiler."""
    return compiled("fake_cuda.c", "-O1", "-pthread", "-ldl")


def as_new_process(patch: pytest.MonkeyPatch, cache_dir: Path, gpu: str = "NVIDIA H200") -> None:
    """A process that has made no kernel yet, with an empty cache, on a machine with GPUs of that name."""
    patch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    patch.setattr(torch.cuda, "get_device_name", lambda index: gpu)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(config, "cache_dir", cache_dir)
    patch.setattr(cuda_loader, "_is_capturing", lambda index: False)
    patch.setattr(cuda_loader, "_made", {})
    for ready in ("_ready", "_written"):
        patch.setattr(cuda_loader, ready, set())
    forget_written()


def forget_written() -> None:
    """Kernels written by hand that this process has made."""
    for made in (cuda_source_kernel._compiled, cuda_source_kernel._loaded, packed_heads._ready):
        made.cache_clear()  # type: ignore[attr-defined]


@contextlib.contextmanager
def in_place(library: Path, host_tensors: bool = True) -> Iterator[FakeDriver]:
    """Run with this driver, and with tensors on the CPU in place of those on device 0."""
    state = FakeDriver.in_dll(ctypes.CDLL(str(library)), "fake")
    ctypes.memset(ctypes.addressof(state), 0, ctypes.sizeof(state))
    state.devices, state.multiprocessors, state.capability = 2, 3, 9
    _native.set_cuda_driver(str(library), host_tensors)
    try:
        yield state
    finally:
        _native.set_cuda_driver(REAL_DRIVER, False)


def emulate(kernels: Iterable[TextKernel[Any]], folder: Path) -> dict[TextKernel[Any], Loadable]:
    """Kernels written by hand, compiled for the CPU in one go."""
    texts = {k: k.text() for k in kernels}
    assert CXX is not None
    kernels_of = {t: SimpleNamespace(source=t, launches=[*map(_launch, _SYMBOL.findall(t))]) for t in texts.values()}
    built = dict(zip(kernels_of, cuda_on_cpu.build(CXX, [*kernels_of.values()], folder), strict=True))  # type: ignore[list-item]
    return {k: k.native(f"{built[t].library._name}:{built[t].number}".encode()) for k, t in texts.items()}


def _launch(symbol: str) -> SimpleNamespace:
    return SimpleNamespace(symbol=symbol)


@contextlib.contextmanager
def in_place_of_written(native: Callable[[TextKernel[Any]], Loadable]) -> Iterator[None]:
    """Kernels written by hand are those that this gives."""

    def loaded(kernel: TextKernel[Any], index: int) -> Loadable:
        made = native(kernel)
        made.load(index)
        return made

    packed_heads._ready.cache_clear()
    with (
        mock.patch.object(cuda_source_kernel, "_loaded", loaded),
        mock.patch.object(cuda_source_kernel, "index_of", lambda device: 0),
    ):
        yield
    packed_heads._ready.cache_clear()


@contextlib.contextmanager
def running(kernels: Iterable[TextKernel[Any]], folder: Path) -> Iterator[FakeDriver]:
    """Kernels written by hand, run by a driver that executes them on the CPU."""
    native = emulate(kernels, folder)
    with in_place_of_written(native.__getitem__), in_place(compile_driver()) as driver:
        yield driver


class Emulation:
    """Generated CUDA kernels, compiled for the CPU and run by the fake driver."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.kernels: dict[str, _native.CudaKernel] = {}
        self._written: dict[TextKernel[Any], Loadable] = {}

    def load(self, descriptions: Sequence[KernelDescription]) -> list[_native.CudaKernel]:
        """The native kernels, in order."""
        new = {d.key: d for d in descriptions if d.key not in self.kernels}
        if new:
            self._build(list(new.values()))
        return [self.kernels[d.key] for d in descriptions]

    def _build(self, descriptions: Sequence[KernelDescription]) -> None:
        folder = self.folder / str(len(self.kernels))
        folder.mkdir(exist_ok=True)
        texts = [cuda.generate(d, "sm_90a") for d in descriptions]
        assert CXX is not None
        for d, text, built in zip(descriptions, texts, cuda_on_cpu.build(CXX, texts, folder), strict=True):
            code = f"{built.library._name}:{built.number}"
            self.kernels[d.key] = native_kernel(d, text, code.encode())

    def written(self, kernel: TextKernel[Any]) -> Loadable:
        """A kernel written by hand."""
        if kernel not in self._written:
            folder = self.folder / f"{kernel.name}_{len(self._written)}"
            folder.mkdir(exist_ok=True)
            self._written.update(emulate([kernel], folder))
        return self._written[kernel]

    @contextlib.contextmanager
    def in_plans(self) -> Iterator[None]:
        """Plans run these kernels, as they would on a GPU."""

        def load(
            descriptions: Sequence[KernelDescription],
            target: str,
            device: torch.device,
            rows: Mapping[str, int] | None = None,
            written: Sequence[Any] = (),
        ) -> dict[str, Any]:
            return {d.key: k for d, k in zip(descriptions, self.load(descriptions), strict=True)}

        def target(device: torch.device, dtype: torch.dtype, kernels: str, fallback: str) -> str:
            return "cuda"

        with (
            mock.patch.object(loading, "load_kernels", load),
            mock.patch.object(pipeline, "target_for", target),
            in_place_of_written(self.written),
        ):
            yield

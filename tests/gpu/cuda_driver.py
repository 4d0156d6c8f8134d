"""Loads and launches generated CUDA kernels through the driver's official bindings."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from te_fuser.codegen import nvrtc
from te_fuser.codegen.cuda import CudaKernel, CudaLaunch
from tests.codegen.cuda_calls import Values, sizes_of
from tests.codegen.cuda_on_cpu import boxed


def arch() -> str:
    """The architecture of the current device."""
    return nvrtc.arch_of(torch.cuda.get_device_capability())


def multiprocessors() -> int:
    """Of the current device."""
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def compile_all(kernels: Sequence[CudaKernel], cache: Path | None = None, threads: int = 8) -> list[nvrtc.Compiled]:
    """Compile for the current device, several at a time."""
    target = arch()
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(lambda k: nvrtc.compile_source(k.source, target, cache=cache), kernels))


def checked(answer: tuple[Any, ...]) -> Any:
    """Values that a driver call returns beside its error code.

    Raises:
        RuntimeError: when the call failed.
    """
    from cuda.bindings import driver

    code, *values = answer
    if code != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"{code}: {driver.cuGetErrorString(code)[1]!r}")
    return values[0] if len(values) == 1 else values


class GpuKernel:
    """A compiled kernel, loaded."""

    def __init__(self, kernel: CudaKernel, compiled: nvrtc.Compiled) -> None:
        from cuda.bindings import driver

        torch.cuda.current_stream()  # makes torch's context the current one
        self.kernel, self.compiled = kernel, compiled
        self.module = checked(driver.cuModuleLoadData(compiled.cubin))
        self.functions = {}
        for launch in kernel.launches:
            function = checked(driver.cuModuleGetFunction(self.module, launch.symbol.encode()))
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            checked(driver.cuFuncSetAttribute(function, attribute, launch.shared_bytes))
            self.functions[launch.symbol] = function

    def call(self, values: Values, rows: int, samples: int) -> Callable[[], None]:
        """A function that launches everything with these arguments, on the stream that is current now."""
        sizes = sizes_of(self.kernel, rows, samples, multiprocessors())
        steps = [
            self._step(launch, blocks, values)
            for launch, blocks in zip(self.kernel.launches, sizes.blocks, strict=True)
            if blocks
        ]

        def run() -> None:
            for step in steps:
                step()

        return run

    def _step(self, launch: CudaLaunch, blocks: int, values: Values) -> Callable[[], None]:
        from cuda.bindings import driver

        held = [boxed(values[p.kind, p.name], p) for p in launch.parameters]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        function, stream = self.functions[launch.symbol], driver.CUstream(torch.cuda.current_stream().cuda_stream)

        def step(keep: object = (held, values)) -> None:
            checked(
                driver.cuLaunchKernel(
                    function, blocks, 1, 1, launch.threads, 1, 1, launch.shared_bytes, stream,
                    ctypes.addressof(pointers), 0,
                )
            )  # fmt: skip

        return step

"""Runs generated CUDA text on the CPU: compiled by the system's C++ compiler with `cuda_on_cpu.h` in front."""

from __future__ import annotations

import ctypes
import functools
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from te_fuser.codegen.cuda import CudaKernel, CudaLaunch, Parameter
from te_fuser.codegen.description import PLACES, KernelDescription
from te_fuser.codegen.nvrtc import INCLUDE
from tests.c_library import temporary_folder
from tests.codegen.cuda_calls import arguments, sizes_of

HERE = Path(__file__).parent
# Lines that stand once for all kernels, or in the way of a namespace for each.
_INCLUDE = re.compile(r'#include "te_\w+\.\w+"')
_OUTSIDE = re.compile(rf'{_INCLUDE.pattern}|extern "C" |extern __shared__ uint4 shelves\[\];')


def build(compiler: str, kernels: Sequence[CudaKernel], folder: Path) -> list[Emulated]:
    """Compile several kernels into one library; each gets a namespace, so that equal names do not meet."""
    text = list(dict.fromkeys(line for kernel in kernels for line in _INCLUDE.findall(kernel.source)))
    for number, kernel in enumerate(kernels):
        text += [f"namespace kernel_{number} {{", _OUTSIDE.sub("", kernel.source)]
        text += [f"EMULATE({number}, {launch.symbol})" for launch in kernel.launches] + ["}"]
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("\n".join(text))
    _compile(compiler, "-shared", "-include", str(_precompiled(compiler)), str(source), "-o", str(library))
    loaded = ctypes.CDLL(str(library))
    return [Emulated(kernel, loaded, number) for number, kernel in enumerate(kernels)]


@functools.cache
def _precompiled(compiler: str) -> Path:
    """A header that includes all that kernels do, which compilers read in less time: it was most of a kernel's."""
    header = temporary_folder() / "ahead.h"
    included = [HERE / "cuda_on_cpu.h", *sorted(INCLUDE.glob("te_cuda*.cuh"))]
    header.write_text("".join(f'#include "{path}"\n' for path in included))
    _compile(compiler, "-x", "c++-header", str(header), "-o", f"{header}.gch")
    return header


def _compile(compiler: str, *arguments: str) -> None:
    # Some systems fortify longjmp by default, which then refuses to leave one stack for another.
    command = [compiler, "-std=c++17", "-U_FORTIFY_SOURCE", "-O0", "-w", "-fPIC", f"-I{INCLUDE}", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]


class Emulated:
    """A kernel that can be called."""

    def __init__(self, kernel: CudaKernel, library: ctypes.CDLL, number: int) -> None:
        self.kernel, self.library, self.number = kernel, library, number

    def __call__(
        self,
        description: KernelDescription,
        tensors: Mapping[str, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        rows: int,
        batch: tuple[int, int] = (1, 1),
        multiprocessors: int = 1,  # few, so that a block has several rows
        place: Sequence[int] = (),
    ) -> None:
        sizes = sizes_of(self.kernel, rows, batch[1], multiprocessors)
        values = arguments(self.kernel, description, tensors, outputs, rows, batch, multiprocessors)
        values |= {("place", name): number for name, number in zip(PLACES, place, strict=False)}
        for launch, blocks in zip(self.kernel.launches, sizes.blocks, strict=True):
            if blocks:
                self._launch(launch, blocks, [values[p.kind, p.name] for p in launch.parameters])

    def _launch(self, launch: CudaLaunch, blocks: int, values: Sequence[torch.Tensor | int | None]) -> None:
        held = [boxed(v, p) for v, p in zip(values, launch.parameters, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        getattr(self.library, f"emulate_{self.number}_{launch.symbol}")(blocks, launch.threads, pointers)


def boxed(value: torch.Tensor | int | None, parameter: Parameter) -> ctypes._SimpleCData:  # type: ignore[type-arg]
    """An argument as a launch takes it: an address, or a number of the parameter's type."""
    if value is None or isinstance(value, torch.Tensor):
        return ctypes.c_void_p(None if value is None else value.data_ptr())
    return (ctypes.c_longlong if parameter.ctype == "long long" else ctypes.c_int)(value)

"""Runs generated CUDA text on the CPU: compiled by the system's C++ compiler with `cuda_on_cpu.h` in front."""

from __future__ import annotations

import ctypes
import math
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from te_fuser.codegen import cuda
from te_fuser.codegen.cuda import CudaKernel, CudaLaunch, Parameter
from te_fuser.codegen.description import KernelDescription
from te_fuser.formula.random import RandomStream

HERE = Path(__file__).parent
INCLUDE = Path(cuda.__file__).parent / "include"
COMPILER = shutil.which("g++") or shutil.which("clang++")


def build(kernels: Sequence[CudaKernel], folder: Path) -> list[Emulated]:
    """Compile several kernels into one library; each gets a namespace, so that equal names do not meet."""
    text = ['#include "te_cuda.cuh"']
    for number, kernel in enumerate(kernels):
        body = re.sub(r'#include "te_cuda.cuh"|extern "C" |extern __shared__ uint4 shelves\[\];', "", kernel.source)
        text += [f"namespace kernel_{number} {{", body]
        text += [f"EMULATE({number}, {launch.symbol})" for launch in kernel.launches] + ["}"]
    source, library = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text("\n".join(text))
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", "-shared", "-fPIC", f"-I{INCLUDE}"]
    command += ["-include", str(HERE / "cuda_on_cpu.h"), str(source), "-o", str(library)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:5000]
    loaded = ctypes.CDLL(str(library))
    return [Emulated(kernel, loaded, number) for number, kernel in enumerate(kernels)]


class Emulated:
    """A kernel that can be called; few multiprocessors, so that blocks have several rows."""

    def __init__(self, kernel: CudaKernel, library: ctypes.CDLL, number: int) -> None:
        self.kernel, self.library, self.number = kernel, library, number

    def __call__(
        self,
        description: KernelDescription,
        tensors: Mapping[str, torch.Tensor],
        outputs: Sequence[torch.Tensor],
        rows: int,
        batch: tuple[int, int] = (1, 1),
        streams: Mapping[str, RandomStream] | None = None,
        multiprocessors: int = 2,
    ) -> None:
        sizes = self.kernel.sizes(rows, batch[1], multiprocessors)
        values = arguments(self.kernel, description, tensors, outputs, rows, batch, streams or {}, multiprocessors)
        for launch, blocks in zip(self.kernel.launches, sizes.blocks, strict=True):
            if blocks:
                self._launch(launch, blocks, [values[p.kind, p.name] for p in launch.parameters])

    def _launch(self, launch: CudaLaunch, blocks: int, values: Sequence[torch.Tensor | int]) -> None:
        held = [_boxed(v, p) for v, p in zip(values, launch.parameters, strict=True)]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(h) for h in held))
        getattr(self.library, f"emulate_{self.number}_{launch.symbol}")(blocks, launch.threads, pointers)


def _boxed(value: torch.Tensor | int, parameter: Parameter) -> ctypes._SimpleCData:  # type: ignore[type-arg]
    if isinstance(value, torch.Tensor):
        return ctypes.c_void_p(value.data_ptr())
    return (ctypes.c_longlong if parameter.ctype == "long long" else ctypes.c_int)(value)


def arguments(
    kernel: CudaKernel,
    description: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    outputs: Sequence[torch.Tensor],
    rows: int,
    batch: tuple[int, int],
    streams: Mapping[str, RandomStream],
    multiprocessors: int,
    device: str = "cpu",
) -> dict[tuple[str, str], torch.Tensor | int]:
    """Every argument by (kind, name); scratch is poisoned with NaN."""
    sizes = kernel.sizes(rows, batch[1], multiprocessors)
    first = next(iter(streams.values()), RandomStream(0, 0, 0))
    found: dict[tuple[str, str], torch.Tensor | int] = {
        ("rows", "rows"): rows,
        ("batch_inner", "batch_inner"): batch[0],
        ("batch_size", "batch_size"): batch[1],
        ("groups", "groups"): sizes.groups,
        ("seed", "seed"): torch.tensor([first.seed, first.offset], dtype=torch.int64, device=device),
    }
    found |= {("load", name): tensor for name, tensor in tensors.items()}
    found |= {("stream", name): stream.stream for name, stream in streams.items()}
    items = [*(("store", t) for t in description.stores), *(("sum", t) for t in description.sums)]
    found |= {(kind, t.name): out for (kind, t), out in zip(items, outputs, strict=True)}
    for partial, size in zip(kernel.partials, sizes.partials, strict=True):
        found["partial", partial.name] = torch.full((size,), math.nan, device=device)
    for name in kernel.row_values:
        found["row_value", name] = torch.full((sizes.row_value,), math.nan, device=device)
    return found

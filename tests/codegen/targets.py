"""Kernels of descriptions on every target: by PyTorch's operations, as C++, and as CUDA text that the CPU runs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from te_fuser._native import CpuKernel
from te_fuser.codegen import cpp, cuda
from te_fuser.codegen.compiler import LoadedKernel, load
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from tests.codegen.corpus import outputs
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED
from tests.codegen.cuda_on_cpu import Emulated, build

COMPILER = shutil.which("g++") or shutil.which("clang++")
ON_EVERY_TARGET = pytest.mark.parametrize("target", ["torch", "cpp", "cuda"])


class Kernels:
    """The kernels of descriptions, by target and key; C++ and CUDA text are compiled in one go each."""

    def __init__(self, descriptions: Iterable[KernelDescription], folder: Path, cache: Path) -> None:
        every = [*descriptions]
        self.loaded = dict(zip([d.key for d in every], load(every, cache_dir=cache), strict=True))
        self.emulated = dict(zip(self.loaded, emulated([cuda.generate(d) for d in every], folder), strict=True))

    def __call__(self, target: str, d: KernelDescription) -> Any:
        """The kernel of a target."""
        if target == "torch":
            return InterpretedKernel(d)
        return self.loaded[d.key].run if target == "cpp" else self.emulated[d.key]


def compiled(descriptions: Mapping[str, KernelDescription]) -> Any:
    """A fixture of a module: the kernels of these descriptions."""

    @pytest.fixture(scope="module")
    def kernels(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Kernels:
        return Kernels(descriptions.values(), tmp_path_factory.mktemp("emulated"), cache)

    return kernels


def emulated(kernels: Sequence[cuda.CudaKernel], folder: Path) -> list[Emulated]:
    """CUDA kernels that the CPU runs."""
    folder.mkdir(exist_ok=True)
    return build(str(COMPILER), kernels, folder)


def shared_out(loaded: LoadedKernel) -> CpuKernel:
    """A C++ kernel so eager to be shared out to threads that two rows are enough."""
    k = cpp.generate(loaded.description)
    sizes = (k.partial_floats, k.partial_floats_per_sample, k.scratch_floats)
    return CpuKernel(str(loaded.library), k.symbol, k.dtypes, *sizes, 1 << 30)


def slots(d: KernelDescription, start: float = 0.0, device: str = "cpu") -> dict[str, torch.Tensor]:
    """The numbers that a kernel raises."""
    return {m.name: torch.tensor([start], device=device) for m in d.maxima}


def call(
    kernel: Any,
    d: KernelDescription,
    tensors: Mapping[str, torch.Tensor],
    rows: int,
    batch: tuple[int, int] = (1, 1),
    raised: Mapping[str, torch.Tensor] | None = None,
    device: str = "cpu",
) -> list[torch.Tensor]:
    """Outputs of a kernel of any target; the numbers that it raises are in `raised`, where that is given."""
    made, raised = outputs(d, rows, batch[1], device), slots(d, device=device) if raised is None else raised
    if isinstance(kernel, Emulated):
        kernel(d, {**tensors, **raised}, made, rows, batch)
        return made
    seed = (torch.tensor([SEED, OFFSET], device=device),) if d.streams else ()
    numbers = tuple(range(FIRST_STREAM, FIRST_STREAM + len(d.streams)))
    given = (t.to(device) for t in tensors.values())
    kernel((*given, *raised.values(), *seed, *made), rows, *batch, numbers)
    return made

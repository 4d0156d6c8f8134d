"""A tensor of 8 bits turned, where no kernel that makes it stores it so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fuser import _native
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task
from te_fuser.kernels import quantizers

if TYPE_CHECKING:
    from te_fuser.codegen.written import WrittenKernel


@dataclass(frozen=True)
class TransposeTask(Task):
    """Rows of 8 bits as [features, rows], with zeros up to a multiple of 16 rows.

    Attributes:
        dtype: that of 8 bits.
        by_kernel: whether the kernel written by hand does it, else PyTorch.
    """

    call = "function"
    compares = False
    own_memory = True

    dtype: torch.dtype
    by_kernel: bool

    @property
    def what(self) -> str:  # type: ignore[override]
        return "kernel" if self.by_kernel else "torch"

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return (quantizers.Transposed8(self.dtype),) if self.by_kernel else ()

    def runner(self, step: Step, bench: Bench) -> Runner:
        ((_, taken),), ((_, given),) = step.inputs, step.outputs
        function = quantizers.transpose_by_kernel if self.by_kernel else quantizers.transpose_by_torch
        return _native.FunctionStep(step.name, function, [bench.slots[taken]], [bench.slots[given]])

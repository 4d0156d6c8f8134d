"""The scale of a call, from the largest magnitude that a pass has found; and the zeros that such passes begin with."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fuser import _native
from te_fuser.fuser.steps.kernel_task import prefer_huge_pages
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task
from te_fuser.kernels import scale_of_amax

if TYPE_CHECKING:
    from te_fuser.codegen.written import WrittenKernel
    from te_fuser.ops.own_scales import Scaling

_GIVEN = 1  # how an output's sizes follow, as the native step calls it: they are given


@dataclass(frozen=True)
class ScaleTask(Task):
    """amax -> scale, inverse; the amax is zero afterwards, so that a graph that is kept runs backward again.

    Attributes:
        dtype: the 8 bits that are scaled to.
        scaling: how the scale follows.
        device: of the GPU whose kernel written by hand does it; None: PyTorch does.
    """

    call = "kernel"
    compares = False
    own_memory = True

    dtype: torch.dtype
    scaling: Scaling
    device: torch.device | None

    @property
    def what(self) -> str:  # type: ignore[override]
        return "torch" if self.device is None else "kernel"

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return (scale_of_amax.ScaleOfAmax.of(self.dtype, self.scaling),) if self.device is not None else ()

    def runner(self, step: Step, bench: Bench) -> Runner:
        (amax,), made = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
        if self.device is None:
            function = functools.partial(scale_of_amax.by_torch, dtype=self.dtype, scaling=self.scaling)
            return _native.FunctionStep(step.name, function, [amax], made)
        outputs = [(slot, 0, _GIVEN, 1, (), torch.float32) for slot in made]
        kernel = scale_of_amax.ScaleOfAmax.of(self.dtype, self.scaling).ready(self.device)
        return _native.KernelStep(
            step.name, kernel, [amax], amax, None, outputs, (1, 1), [], sys.maxsize, prefer_huge_pages
        )


@dataclass(frozen=True)
class ZerosTask(Task):
    """Zeros that are raised to largest magnitudes, for a whole call at once.

    Attributes:
        numbers: of the ops that raise them.
    """

    what = "before"
    call = "function"
    compares = False

    device: torch.device
    numbers: tuple[int, ...]

    @property
    def ops(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.numbers

    def runner(self, step: Step, bench: Bench) -> Runner:
        function = functools.partial(_zeros, len(step.outputs), self.device)
        return _native.FunctionStep(step.name, function, [], [bench.slots[r] for r in step.writes()])


def _zeros(count: int, device: torch.device) -> torch.Tensor | tuple[torch.Tensor, ...]:
    made = torch.zeros(count, dtype=torch.float32, device=device)
    return made.unbind() if count > 1 else made[0]

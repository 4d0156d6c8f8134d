"""The scale of a call, from the largest magnitude that a pass has found; and the zeros that such passes begin with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fuser import _native
from te_fuser.codegen.description import NUMBERS
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task
from te_fuser.kernels import quantizers

if TYPE_CHECKING:
    from te_fuser.ops.own_scales import Scaling


@dataclass(frozen=True)
class ScaleTask(Task):
    """amax -> scale, inverse; the amax is zero afterwards, so that a graph that is kept runs backward again.

    Attributes:
        dtype: the 8 bits that are scaled to.
        scaling: how the scale follows.
        is_there: whether the pass has made both beside the amax; else PyTorch does.
    """

    call = "function"
    compares = False

    dtype: torch.dtype
    scaling: Scaling
    is_there: bool

    @property
    def what(self) -> str:  # type: ignore[override]
        return "kernel" if self.is_there else "torch"

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return not self.is_there

    def runner(self, step: Step, bench: Bench) -> Runner:
        (amax,), made = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
        if not self.is_there:
            function = functools.partial(quantizers.scale_by_torch, dtype=self.dtype, scaling=self.scaling)
            return _native.FunctionStep(step.name, function, [amax], made)
        named = dict(zip((name for name, _ in step.outputs), made, strict=True))
        return _native.FunctionStep(step.name, torch.Tensor.unbind, [amax], [named.get(n, -1) for n in NUMBERS])


@dataclass(frozen=True)
class ZerosTask(Task):
    """Zeros that are raised to largest magnitudes, for a whole call at once.

    Attributes:
        numbers: of the ops that raise them.
        in_kernels: whether kernels make scales of them, beside each: `NUMBERS`.
    """

    what = "before"
    call = "function"
    compares = False  # and what it makes lies in one memory

    device: torch.device
    numbers: tuple[int, ...]
    in_kernels: bool

    @property
    def ops(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.numbers

    def runner(self, step: Step, bench: Bench) -> Runner:
        function = functools.partial(_zeros, len(step.outputs), self.in_kernels, self.device)
        return _native.FunctionStep(step.name, function, [], [bench.slots[r] for r in step.writes()])


def _zeros(count: int, in_kernels: bool, device: torch.device) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if in_kernels:
        made = quantizers.of_nothing(count, device)
    else:
        made = torch.zeros(count, dtype=torch.float32, device=device)
    return made.unbind() if count > 1 else made[0]

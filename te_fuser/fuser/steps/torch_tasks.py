"""Steps that are one PyTorch operation: sums of gradients, casts of parameters, functions that autograd records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser import _native
from te_fuser.fuser.steps.step import Bench, Runner, Step, Task


@dataclass(frozen=True)
class AddTask(Task):
    """Adds up the contributions to one gradient."""

    what = "torch"
    call = "torch"
    compares = False
    own_memory = True

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads = [bench.slots[r] for r in step.reads()]
        function = torch.add if len(reads) == 2 else _sum
        return _native.FunctionStep(step.name, function, reads, [bench.slots[step.outputs[0][1]]])


@dataclass(frozen=True)
class RecordedTask(Task):
    """A function of PyTorch's that autograd records."""

    what = "torch"
    call = "recorded"

    function: Callable[..., torch.Tensor]

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads = [bench.slots[r] for r in step.reads()]
        return _native.FunctionStep(step.name, self.function, reads, [bench.slots[step.outputs[0][1]]])


@dataclass(frozen=True)
class RecordedBackwardTask(Task):
    """The gradient of such a function: PyTorch's own business, which runs when autograd comes to its node."""

    what = "autograd"
    call = "recorded backward"
    compares = False


def _sum(*terms: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


@dataclass(frozen=True)
class CastTask(Task):
    """A parameter in another dtype, for autocast."""

    what = "torch"
    call = "torch"
    compares = False

    dtype: torch.dtype

    def runner(self, step: Step, bench: Bench) -> Runner:
        dtype, ((_, taken),), ((_, given),) = self.dtype, step.inputs, step.outputs
        return _native.FunctionStep(step.name, lambda p: p.to(dtype), [bench.slots[taken]], [bench.slots[given]])

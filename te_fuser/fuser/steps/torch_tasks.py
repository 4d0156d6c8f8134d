"""Steps that are one PyTorch operation: sums of gradients, casts of parameters, functions that autograd records."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser import _native
from te_fuser.fuser.steps.step import Bench, Called, Runner, Step, Task
from te_fuser.params.main_grad import is_absent


@dataclass(frozen=True)
class AddTask(Task):
    """Adds up the contributions to one gradient.

    Attributes:
        some_absent: whether terms may be absent, since they went to a main_grad.
    """

    what = "torch"
    call = "torch"
    compares = False

    some_absent: bool = False

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return not self.some_absent

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads = [bench.slots[r] for r in step.reads()]
        function = _sum_of_present if self.some_absent else torch.add if len(reads) == 2 else _sum
        return _native.FunctionStep(step.name, function, reads, [bench.slots[step.outputs[0][1]]])


@dataclass(frozen=True)
class RecordedTask(Task):
    """A function of PyTorch's that autograd records."""

    what = "torch"
    call = "recorded"

    function: Callable[..., torch.Tensor]

    def called(self, step: Step) -> Called:
        return Called(self.function, tuple(step.reads()))

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


def _sum_of_present(*terms: torch.Tensor) -> torch.Tensor:
    return _sum(*([t for t in terms if not is_absent(t)] or terms[:1]))


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

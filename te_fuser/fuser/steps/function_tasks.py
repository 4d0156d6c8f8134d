"""Steps that are one function of tensors: sums, casts, recorded functions, scales, 8 bits turned, makers' tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fuser import _native
from te_fuser.codegen.description import NUMBERS
from te_fuser.fuser.graph.refs import LEFT
from te_fuser.fuser.steps.step import Bench, Called, Runner, Step, Task
from te_fuser.kernels import quantizers
from te_fuser.params.gradient_sums import start_sums, wait_for_sums
from te_fuser.params.main_grad import is_absent
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.codegen.written import WrittenKernel
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.steps.step import Slots
    from te_fuser.fusions.registry import Maker, Wanted
    from te_fuser.ops.own_scales import Scaling


class FunctionTask(Task):
    """One function of the tensors that the step reads, in their order, which gives what the step makes."""

    compares = False

    def function_of(self, step: Step) -> Callable[..., Any]:
        """The function."""
        raise NotImplementedError

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads, writes = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
        return _native.FunctionStep(step.name, self.function_of(step), reads, writes)


@dataclass(frozen=True)
class AddTask(FunctionTask):
    """Adds up the contributions to one gradient.

    Attributes:
        some_absent: whether terms may be absent, since they went to a main_grad.
    """

    what = "torch"
    call = "torch"

    some_absent: bool = False

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return not self.some_absent

    def function_of(self, step: Step) -> Callable[..., Any]:
        return _sum_of_present if self.some_absent else torch.add if len(step.inputs) == 2 else _sum


@dataclass(frozen=True)
class RecordedTask(FunctionTask):
    """A function of PyTorch's that autograd records."""

    what = "torch"
    call = "recorded"
    compares = True

    function: Callable[..., torch.Tensor]

    def called(self, step: Step) -> Called:
        return Called(self.function, tuple(step.reads()))

    def function_of(self, step: Step) -> Callable[..., Any]:
        return self.function


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
class CastTask(FunctionTask):
    """A parameter in another dtype, for autocast."""

    what = "torch"
    call = "torch"

    dtype: torch.dtype

    def function_of(self, step: Step) -> Callable[..., Any]:
        return lambda p: p.to(self.dtype)


@dataclass(frozen=True)
class SumTask(Task):
    """One of the two steps that add up gradients of parameters over ranks.

    Attributes:
        group: the ranks.
        parameters: whose gradients, as the graph counts them; those that a call leaves to the engine stay terms.
        phase: "start" or "wait".
    """

    what = "torch"
    compares = False

    group: Group
    parameters: tuple[int, ...]
    phase: str
    ops: tuple[int, ...] = ()

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.phase == "wait"

    def runner(self, step: Step, bench: Bench) -> Runner:
        inputs, outputs = dict(step.inputs), dict(step.outputs)
        terms = [(p, bench.slots[inputs[f"term {p}"]]) for p in self.parameters]
        under_way = bench.slots[inputs["started"] if self.waits else outputs["started"]]
        left, group = bench.slots[LEFT], self.group

        def start(slots: Slots) -> None:
            slots[under_way] = start_sums([slots[k] for p, k in terms if p not in slots[left]], group)

        if not self.waits:
            return start
        made = [bench.slots[outputs[f"sum {p}"]] for p in self.parameters]

        def wait(slots: Slots) -> None:
            own = [slots[k] for p, k in terms if p not in slots[left]]
            sums = iter(wait_for_sums(slots[under_way], own, group))
            for (p, term), k in zip(terms, made, strict=True):
                slots[k] = slots[term] if p in slots[left] else next(sums)

        return wait


@dataclass(frozen=True)
class ScaleTask(FunctionTask):
    """amax -> scale, inverse; the amax is zero afterwards, so that a graph that is kept runs backward again.

    Attributes:
        dtype: the 8 bits that are scaled to.
        scaling: how the scale follows.
        is_there: whether the pass has made both beside the amax; else PyTorch does.
    """

    call = "function"

    dtype: torch.dtype
    scaling: Scaling
    is_there: bool

    @property
    def what(self) -> str:  # type: ignore[override]
        return "kernel" if self.is_there else "torch"

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return not self.is_there

    def function_of(self, step: Step) -> Callable[..., Any]:
        return functools.partial(quantizers.scale_by_torch, dtype=self.dtype, scaling=self.scaling)

    def runner(self, step: Step, bench: Bench) -> Runner:
        if not self.is_there:
            return super().runner(step, bench)
        amax, named = bench.slots[step.inputs[0][1]], {name: bench.slots[r] for name, r in step.outputs}
        return _native.FunctionStep(step.name, torch.Tensor.unbind, [amax], [named.get(n, -1) for n in NUMBERS])


@dataclass(frozen=True)
class ZerosTask(FunctionTask):
    """Zeros that are raised to largest magnitudes, for a whole call at once.

    Attributes:
        numbers: of the ops that raise them.
        in_kernels: whether kernels make scales of them, beside each: `NUMBERS`.
    """

    what = "before"
    call = "function"

    device: torch.device
    numbers: tuple[int, ...]
    in_kernels: bool

    @property
    def ops(self) -> tuple[int, ...]:  # type: ignore[override]
        return self.numbers

    def function_of(self, step: Step) -> Callable[..., Any]:
        return functools.partial(_zeros, len(step.outputs), self.in_kernels, self.device)


def _zeros(count: int, in_kernels: bool, device: torch.device) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if in_kernels:
        made = quantizers.of_nothing(count, device)
    else:
        made = torch.zeros(count, dtype=torch.float32, device=device)
    return made.unbind() if count > 1 else made[0]


@record()
class MakeTask(FunctionTask):
    """Makes parameters of others, before the segments of a call.

    Attributes:
        wanted: of each op that something is made for.
    """

    what = "before"
    call = "product"

    maker: Maker
    wanted: tuple[Wanted, ...]
    device: torch.device
    ops: tuple[int, ...]

    @property
    def identity(self) -> object:
        return self.maker, [(w.makes, w.again, tuple(w.given.values())) for w in self.wanted]

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return self.maker.written(self.wanted)

    def function_of(self, step: Step) -> Callable[..., Any]:
        return self.maker.function(self.wanted, self.device)


@dataclass(frozen=True)
class TransposeTask(FunctionTask):
    """Rows of 8 bits as [features, rows], with zeros up to a multiple of 16 rows.

    Attributes:
        dtype: that of 8 bits.
        by_kernel: whether the kernel written by hand does it, else PyTorch.
    """

    call = "function"
    own_memory = True

    dtype: torch.dtype
    by_kernel: bool

    @property
    def what(self) -> str:  # type: ignore[override]
        return "kernel" if self.by_kernel else "torch"

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return (quantizers.Transposed8(self.dtype),) if self.by_kernel else ()

    def function_of(self, step: Step) -> Callable[..., Any]:
        return quantizers.transpose_by_kernel if self.by_kernel else quantizers.transpose_by_torch

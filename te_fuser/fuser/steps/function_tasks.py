"""Steps that are one function of tensors: sums, casts, recorded functions, scales, 8 bits turned, makers' tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from te_fuser import _native
from te_fuser.codegen.description import NUMBERS
from te_fuser.fuser.graph.refs import LEFT
from te_fuser.fuser.steps.step import Bench, Called, Runner, Step, Task
from te_fuser.kernels import scale_of_amax, transposed8
from te_fuser.params.gradient_sums import start_sums, wait_for_sums
from te_fuser.params.main_grad import is_absent
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.codegen.written import WrittenKernel
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.steps.step import Slots
    from te_fuser.fusions.makers import Maker, Wanted
    from te_fuser.ops.own_scales import Scaling


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


@dataclass(frozen=True)
class SumTask(Task):
    """One of the two steps.

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
            function = functools.partial(scale_of_amax.by_torch, dtype=self.dtype, scaling=self.scaling)
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
        made = scale_of_amax.of_nothing(count, device)
    else:
        made = torch.zeros(count, dtype=torch.float32, device=device)
    return made.unbind() if count > 1 else made[0]


@record()
class MakeTask(Task):
    """Makes parameters of others, before the segments of a call.

    Attributes:
        wanted: of each op that something is made for.
    """

    what = "before"
    call = "product"
    compares = False

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

    def runner(self, step: Step, bench: Bench) -> Runner:
        reads, writes = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
        return _native.FunctionStep(step.name, self.maker.function(self.wanted, self.device), reads, writes)


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
        return (transposed8.Transposed8(self.dtype),) if self.by_kernel else ()

    def runner(self, step: Step, bench: Bench) -> Runner:
        ((_, taken),), ((_, given),) = step.inputs, step.outputs
        function = transposed8.by_kernel if self.by_kernel else transposed8.by_torch
        return _native.FunctionStep(step.name, function, [bench.slots[taken]], [bench.slots[given]])

"""Steps that are one function: sums, casts, recorded functions, scales, 8 bits turned, products that exchange rows."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from te_fuser import _native
from te_fuser.codegen.description import NUMBERS
from te_fuser.fuser.graph.refs import LEFT
from te_fuser.fuser.steps.step import Bench, Called, Runner, Step, Task, made_name
from te_fuser.kernels import quantizers
from te_fuser.kernels.peers import PeersOf
from te_fuser.params.gradient_sums import start_sums, wait_for_sums
from te_fuser.params.main_grad import is_absent
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.steps.step import Slots
    from te_fuser.fusions.registry import Maker, Wanted
    from te_fuser.recipe.recipes import OwnScales

GATHERED = "gathered"  # what a step calls the rows of all ranks that it gives beside its product


@record()
class FunctionTask(Task):
    """One function of the tensors that the step reads, in their order, which gives what the step makes."""

    function: Callable[..., Any]
    what: str = "torch"
    call: str = "torch"
    options: tuple[tuple[str, Any], ...] = ()  # what else the function takes
    gives: tuple[str, ...] = ()  # names of all that it gives, where the step may not have all
    compares: bool = False
    own_memory: bool = False
    written: tuple[WrittenKernel, ...] = ()
    ops: tuple[int, ...] = ()

    def called(self, step: Step) -> Called | None:
        return Called(self.function, tuple(step.reads())) if self.call == "recorded" else None

    def runner(self, step: Step, bench: Bench) -> Runner:
        function = functools.partial(self.function, **dict(self.options)) if self.options else self.function
        return _function_step(step, bench, function, self.gives)


def _function_step(step: Step, bench: Bench, function: Callable[..., Any], gives: Sequence[str] = ()) -> Runner:
    reads, writes = ([bench.slots[r] for r in refs] for refs in (step.reads(), step.writes()))
    if gives:
        made = dict(zip((name for name, _ in step.outputs), writes, strict=True))
        writes = [made.get(name, -1) for name in gives]
    return _native.FunctionStep(step.name, function, reads, writes)


def cast_task(dtype: torch.dtype) -> FunctionTask:
    """A parameter in another dtype, for autocast."""
    return FunctionTask(torch.Tensor.to, options=(("dtype", dtype),))


def recorded_task(function: Callable[..., torch.Tensor]) -> FunctionTask:
    """A function of PyTorch's that autograd records."""
    return FunctionTask(function, call="recorded", compares=True)


@dataclass(frozen=True)
class RecordedBackwardTask(Task):
    """The gradient of such a function, which autograd runs."""

    what = "autograd"
    call = "recorded backward"
    compares = False


def add_task(terms: int, some_absent: bool) -> FunctionTask:
    """Adds up the contributions to one gradient; terms may be absent, since they went to a main_grad."""
    function = _sum_of_present if some_absent else torch.add if terms == 2 else _sum
    return FunctionTask(function, own_memory=not some_absent)


def _sum(*terms: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


def _sum_of_present(*terms: torch.Tensor) -> torch.Tensor:
    return _sum(*([t for t in terms if not is_absent(t)] or terms[:1]))


@dataclass(frozen=True)
class SumTask(Task):
    """One of the two steps that add up gradients of parameters over ranks."""

    what = "torch"
    compares = False

    group: Group
    parameters: tuple[int, ...]
    phase: str  # "start" or "wait"
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


def scale_task(dtype: torch.dtype, scaling: OwnScales, is_there: bool) -> FunctionTask:
    """amax -> scale, inverse; the amax is zero afterwards, so that a graph that is kept runs backward again.

    Where both are there, the pass has made them beside the amax; else PyTorch does.
    """
    if is_there:
        return FunctionTask(torch.Tensor.unbind, "kernel", "function", gives=NUMBERS)
    options = (("dtype", dtype), ("scaling", scaling))
    return FunctionTask(quantizers.scale_by_torch, call="function", options=options, own_memory=True)


def zeros_task(device: torch.device, ops: tuple[int, ...], count: int, in_kernels: bool) -> FunctionTask:
    """Zeros that `ops` raise to largest magnitudes, for a call; `in_kernels`: scales are beside them."""
    options = (("count", count), ("in_kernels", in_kernels), ("device", device))
    return FunctionTask(_zeros, "before", "function", options, ops=ops)


def _zeros(count: int, in_kernels: bool, device: torch.device) -> torch.Tensor | tuple[torch.Tensor, ...]:
    if in_kernels:
        made = quantizers.of_nothing(count, device)
    else:
        made = torch.zeros(count, dtype=torch.float32, device=device)
    return made.unbind() if count > 1 else made[0]


@record()
class MakeTask(Task):
    """Makes parameters of others, before the segments of a call."""

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
        return _function_step(step, bench, self.maker.function(self.wanted, self.device))


def transpose_task(dtype: torch.dtype, by_kernel: bool) -> FunctionTask:
    """Rows of 8 bits as [features, rows], with zeros up to a multiple of 16 rows."""
    if not by_kernel:
        return FunctionTask(quantizers.transpose_by_torch, call="function", own_memory=True)
    written = (quantizers.Transposed8(dtype),)
    return FunctionTask(quantizers.transpose_by_kernel, "kernel", "function", own_memory=True, written=written)


@record()
class PeerProductTask(Task):
    """A native product of rows, of rows that are gathered, or scattered and added up.

    Attributes:
        product: the task of the product alone.
        scatters: whether it scatters what it makes; else it gathers the first tensor that it takes.
        group: the ranks, on `device`.
        adds: whether it adds up what was scattered; else it gives all ranks' parts, and the buffer they lie in.
    """

    what = "fusion"
    call = "product"

    product: Task
    scatters: bool
    group: Group
    device: torch.device
    adds: bool = True

    @property
    def identity(self) -> Any:
        return self.product.identity, self.scatters, self.group, self.device, self.adds

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return self.adds

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.adds

    @property
    def hangs(self) -> bool:  # type: ignore[override]
        return self.product.hangs

    @property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        return self.product.written

    def runs_by(self) -> str:
        return self.product.runs_by()

    def runner(self, step: Step, bench: Bench) -> Runner:
        """A native step, which runs without the interpreter but for what PyTorch allocates."""
        product, peers = self.product.row_product, PeersOf(self.group, self.device)
        assert product is not None
        read, made = dict(step.inputs), {made_name(name): bench.slots[r] for name, r in step.outputs}
        inputs = [bench.slots[read[name]] for name in product.takes]
        if self.scatters:
            function = _native.MatmulScatter(product.make, peers, not self.adds)
            return _native.FunctionStep(step.name, function, inputs, [*made.values()])
        outputs = [made.get(name, -1) for name in product.gives]
        gives = GATHERED in made
        gather = _native.GatherMatmul(product.make, peers, gives)
        return _native.FunctionStep(step.name, gather, inputs, [*outputs, *([made[GATHERED]] if gives else [])])

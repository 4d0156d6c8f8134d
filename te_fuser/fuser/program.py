"""Steps made ready to run: refs become slots, tasks become steps, and running is a loop in the native runtime."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser import _native
from te_fuser.codegen.description import KernelDescription, Load
from te_fuser.dtypes import FLOATING
from te_fuser.formula.expr import Axes
from te_fuser.formula.random import RandomStream
from te_fuser.fuser import memory
from te_fuser.fuser.plan import AddTask, CastTask, FusionTask, OpForward, OpGradient, Plan, Step
from te_fuser.fuser.refs import DOUBLED, NOTES, PARAMETER, PARAMETER_GRADIENT, SEED, Ref
from te_fuser.fuser.stretch import KernelPlan
from te_fuser.fusions.match import FusionCall
from te_fuser.ops.base import OpCall, UnfusedOperation, batch_layout
from te_fuser.ops.tensor_function import TensorFunction

Slots = list[Any]
Runner = Callable[[Slots], None]
# kernel(tensors: loads, seed if it draws, stores, sums; rows; batch_inner; batch_size; stream numbers)
KernelFunction = Callable[[tuple[torch.Tensor, ...], int, int, int, tuple[int, ...]], None]
# What runs in a step's place, given it, its runner and the slots of refs; how verify sees every step.
Wrapper = Callable[[Step, Runner, "SlotMap"], Runner]


class SlotMap:
    """Numbers for refs."""

    def __init__(self) -> None:
        self.numbers: dict[Ref, int] = {}

    def __getitem__(self, ref: Ref) -> int:
        return self.numbers.setdefault(ref, len(self.numbers))

    def __contains__(self, ref: Ref) -> bool:
        return ref in self.numbers

    def __len__(self) -> int:
        return len(self.numbers)


def stream_of(seed: torch.Tensor, number: int, layout: tuple[int, int]) -> RandomStream:
    """The random stream `number` of a call whose (seed, offset) is `seed`."""
    value, offset = seed.tolist()
    return RandomStream(value, offset, number, *layout)


# How an output's sizes follow from a call's; in the order of the native runtime.
_ROWS, _FIXED, _SAMPLES, _SAMPLE_ROWS = range(4)
_ANY_SIZE = (_FIXED, -1)


def _kernel_step(plan: KernelPlan, kernel: KernelFunction | None, slots: SlotMap, dying: Container[int]) -> Runner:
    """A generated kernel as a native step: inputs made contiguous, outputs allocated, or those that die, launched."""
    description = plan.description
    refs = list(plan.inputs) + ([SEED] if description.streams else [])
    widest = max((o.width * FLOATING[o.dtype].itemsize for o in plan.outputs if o.axes & Axes.OUTER), default=0)
    return _native.KernelStep(
        description.name,
        # The native kernel itself, where there is one: its Python front takes as long as launching it.
        getattr(kernel, "run", kernel),
        [slots[r] for r in refs],
        slots[plan.lead],
        plan.batch_dim,
        [
            (slots[o.ref], -1 if alike is None else alike, _shape_rule(o.axes), o.width, o.shape, FLOATING[o.dtype])
            for o, alike in zip(plan.outputs, _alike(plan, len(refs)), strict=True)
        ],
        plan.streams,
        [(slots[new], slots[old]) for new, old in plan.aliases],
        memory.LARGE // widest if widest else sys.maxsize,
        memory.prefer_huge_pages,
        [_input_size(load) for load in description.loads] + [_ANY_SIZE] * (len(refs) - len(plan.inputs)),
        [slots[r] for r in plan.overwritten() if slots[r] in dying],
    )


def _shape_rule(axes: Axes) -> int:
    """How the sizes of a tensor with these axes follow from a call's."""
    if axes & Axes.OUTER:
        return _ROWS
    if axes & Axes.BATCH:
        return _SAMPLE_ROWS if axes & Axes.FEATURE else _SAMPLES
    return _FIXED


def _input_size(load: Load) -> tuple[int, int]:
    """How many elements a tensor has that a kernel loads, as the native step takes it."""
    return _shape_rule(load.axes), load.width if load.axes & Axes.FEATURE else 1


def _alike(plan: KernelPlan, inputs: int) -> list[int | None]:
    """For each output the tensor of the same sizes and dtype among the inputs and the outputs before it, by number."""
    forms: dict[Any, int] = {}
    for k, (ref, load) in enumerate(zip(plan.inputs, plan.description.loads, strict=True)):
        if ref == plan.lead:
            forms[_ROWS, load.width, load.dtype] = k
        elif ref.kind is PARAMETER:
            forms[ref.index, load.dtype] = k
    found = []
    for k, o in enumerate(plan.outputs, inputs):
        form: Any = (_ROWS, o.width, o.dtype) if o.axes & Axes.OUTER else (o.ref, o.dtype)
        if o.ref.kind is PARAMETER_GRADIENT and not o.ref.term:
            form = (o.ref.index, o.dtype)
        found.append(forms.get(form))
        forms.setdefault(form, k)
    return found


def _op_step(step: Step, task: OpForward | OpGradient, slots: SlotMap) -> Runner:
    """A method of an opaque op: its plain function in a native step where it has one."""
    method = getattr(task.node.op, "op_forward" if isinstance(task, OpForward) else task.gradient.method)
    plain: TensorFunction | None = getattr(method, "plain", None)
    read, made = dict(step.inputs), list(step.outputs)
    if plain is None or len(made) != 1 or any(name not in read for name in plain.reads):
        return OpRunner(step, task, slots) if isinstance(task, OpForward) else GradientRunner(step, task, slots)
    reads = [slots[read[name]] for name in plain.reads]
    return _native.FunctionStep(task.node.label, plain.function, reads, [slots[made[0][1]]])


class OpRunner:
    """Runs an opaque op's own forward."""

    __slots__ = ("_draws", "_function", "_input", "_inputs", "_node", "_notes", "_outputs", "_seed")

    def __init__(self, step: Step, task: OpForward, slots: SlotMap) -> None:
        self._node = task.node
        op = task.node.op
        assert isinstance(op, UnfusedOperation)
        self._function = op.op_forward
        self._inputs, given = _named_slots(step.inputs, slots, "seed")
        self._input, self._seed = dict(self._inputs)["input"], given["seed"]
        self._outputs = tuple((name, slots[r]) for name, r in step.outputs)
        self._notes = slots[Ref(NOTES, task.node.index)]
        self._draws = task.node.draws

    def __call__(self, slots: Slots) -> None:
        call = OpCall({name: slots[k] for name, k in self._inputs})
        if self._draws:
            call.random = stream_of(slots[self._seed], self._node.stream, (1, 1))
        y = self._function(call, slots[self._input])
        slots[self._notes] = call.notes
        for name, k in self._outputs:
            slots[k] = y if name == "output" else _emitted(self._node.label, call.emitted, name)


def _named_slots(
    refs: Iterable[tuple[str, Ref]], slots: SlotMap, *apart: str
) -> tuple[tuple[tuple[str, int], ...], dict[str, int]]:
    """The slots of named refs, and those of some names apart; -1 for one of these that is not there."""
    found = {name: slots[r] for name, r in refs}
    given = {name: found.pop(name, -1) for name in apart}
    return tuple(found.items()), given


def _emitted(label: str, made: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    if name not in made:
        raise RuntimeError(f"{label} declares {name!r} but did not emit it; call emit({name!r}, tensor) in its forward")
    return made[name]


class GradientRunner:
    """Runs one node of an opaque op's backward."""

    __slots__ = ("_draws", "_dy", "_function", "_inputs", "_needed", "_node", "_notes", "_outputs", "_seed")

    def __init__(self, step: Step, task: OpGradient, slots: SlotMap) -> None:
        self._node, self._needed = task.node, task.needed
        self._function = getattr(task.node.op, task.gradient.method)
        self._inputs, given = _named_slots(step.inputs, slots, "dy", "seed")
        self._dy, self._seed = given["dy"], given["seed"]
        self._outputs = tuple((name.removeprefix("d_"), slots[r]) for name, r in step.outputs)
        self._notes = slots[Ref(NOTES, task.node.index)]
        self._draws = task.node.draws

    def __call__(self, slots: Slots) -> None:
        call = OpCall({name: slots[k] for name, k in self._inputs}, self._needed)
        call.notes = slots[self._notes] or {}
        if self._draws:
            call.random = stream_of(slots[self._seed], self._node.stream, (1, 1))
        made = self._function(call, slots[self._dy])
        for name, k in self._outputs:
            slots[k] = _gradient(self._node.label, made, name)


def _gradient(label: str, made: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor:
    found = made.get(name)
    if found is None:
        raise RuntimeError(f"{label}: its backward gave no gradient for {name!r}, which is needed")
    return found


def _fusion_step(step: Step, task: FusionTask, slots: SlotMap) -> Runner:
    """A registered fusion: in a native step where its body is a plain function of tensors."""
    fusion = task.fusion
    joint_backward = fusion.direction == "joint" and task.direction == "backward"
    takes, gives = () if joint_backward else fusion.takes, fusion.gives
    body = task.body or (fusion.run_forward if task.direction == "forward" else fusion.run_backward)
    if task.gradient is not None:
        takes, gives = ("dy", *task.gradient.reads), task.gradient.produces
        body = task.body or getattr(body, task.gradient.method)
    if not takes:
        return FusionRunner(step, task, slots)
    read, made = dict(step.inputs), {name.removeprefix("d_"): slots[r] for name, r in step.outputs}
    missing = [name for name in takes if name not in read]
    if missing:
        raise ValueError(f"fusion {fusion.name!r} takes {missing[0]!r}, which it has not (there are {sorted(read)})")
    assert body is not None
    inputs = [slots[read[name]] for name in takes]
    return _native.FunctionStep(f"fusion {fusion.name}", body, inputs, [made.get(name, -1) for name in gives])


class FusionRunner:
    """Runs a registered fusion in one direction."""

    __slots__ = ("_first", "_forward", "_function", "_inputs", "_label", "_needed", "_ops", "_outputs", "_streams")

    def __init__(self, step: Step, task: FusionTask, slots: SlotMap) -> None:
        self._forward = task.direction == "forward"
        function = task.fusion.run_forward if self._forward else task.fusion.run_backward
        assert function is not None
        self._function = function
        self._ops = tuple(n.op for n in task.nodes)
        self._needed = task.needed
        self._inputs = tuple((name, slots[r]) for name, r in step.inputs)
        self._first = dict(self._inputs)["input" if self._forward else "dy"]
        self._outputs = tuple((name, slots[r]) for name, r in step.outputs)
        self._streams = tuple((k, n) for k, n in enumerate(task.nodes) if n.draws)
        self._label = f"fusion {task.fusion.name!r} over {', '.join(n.label for n in task.nodes)}"

    def __call__(self, slots: Slots, later: object = None) -> None:
        """Run it; where its column sums may wait, the native loop says where they are left."""
        tensors = {name: slots[k] for name, k in self._inputs}
        first = slots[self._first]
        streams = {}
        for k, node in self._streams:
            layout = batch_layout(first.shape, node.op.batch_dim())
            # Read only when somebody draws from it: a seed on a GPU is waited for.
            streams[k] = functools.partial(stream_of, tensors["seed"], node.stream, layout)
        call = FusionCall(self._ops, tensors, self._needed, streams, later)
        result = self._function(call, first)
        if self._forward:
            self._store_forward(slots, call, result)
        else:
            self._store_backward(slots, result)

    def _store_forward(self, slots: Slots, call: FusionCall, result: Any) -> None:
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"{self._label}: its forward must return a tensor, got {type(result).__name__}")
        for name, k in self._outputs:
            slots[k] = result if name == "output" else _emitted(self._label, call.made, name)

    def _store_backward(self, slots: Slots, result: Any) -> None:
        dx, others = result if isinstance(result, tuple) else (result, {})
        made = {"input": dx, **others}
        for name, k in self._outputs:
            slots[k] = _gradient(self._label, made, name)


def _add_step(step: Step, slots: SlotMap) -> Runner:
    """Adds up contributions to one gradient."""
    reads = [slots[r] for r in step.reads()]
    function = torch.add if len(reads) == 2 else _sum
    return _native.FunctionStep(step.name, function, reads, [slots[step.outputs[0][1]]])


def _sum(*terms: torch.Tensor) -> torch.Tensor:
    return functools.reduce(torch.add, terms)


def _cast_step(step: Step, task: CastTask, slots: SlotMap) -> Runner:
    """A parameter in another dtype."""
    dtype = task.dtype
    return _native.FunctionStep(
        step.name, lambda p: p.to(dtype), [slots[step.inputs[0][1]]], [slots[step.outputs[0][1]]]
    )


@dataclass(frozen=True)
class Program:
    """Steps in order, and after each the slots nobody reads any more.

    Slots are the inputs in their order, then what the steps make, and a last one that stays empty. `run` takes
    them, and whether outputs may be stored over what dies (by default they may).
    """

    run: Callable[..., None]
    size: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    blank: tuple[None, ...]

    def slots(self, tensors: Iterable[torch.Tensor | None]) -> Slots:
        """Slots that hold the inputs."""
        return [*tensors, *self.blank]


def build_program(
    steps: Sequence[Step],
    inputs: Iterable[Ref],
    outputs: Iterable[Ref],
    kernels: Mapping[str, KernelFunction],
    wrap: Wrapper | None = None,
    sums: _native.ColumnSums | None = None,
) -> tuple[Program, SlotMap]:
    """Steps as a program whose first slots are `inputs`; `outputs` are never dropped.

    Args:
        kernels: description key -> the kernel.
        sums: adds up all column sums at the end that no step reads; without it each kernel adds up its own.
    """
    slots = SlotMap()
    # Two inputs may be one tensor under two names; nobody reads the second.
    numbers_in = tuple(slots[Ref(DOUBLED, k) if r in slots else r] for k, r in enumerate(inputs))
    numbers_out = tuple(slots[r] for r in outputs)
    last: dict[int, int] = {}
    for k, step in enumerate(steps):
        for ref in (*step.reads(), *step.writes()):
            last[slots[ref]] = k
    held = set(numbers_out)
    dead: dict[int, list[int]] = {}
    for slot, k in last.items():
        if slot not in held:
            dead.setdefault(k, []).append(slot)
    # What stands in a step's place may run it again, or look at what it has read.
    runners = [_runner(s, slots, kernels, () if wrap else dead.get(k, ())) for k, s in enumerate(steps)]
    if wrap is not None:
        runners = [wrap(s, r, slots) for s, r in zip(steps, runners, strict=True)]
    may_wait = [] if wrap else [k for k, s in enumerate(steps) if _sums_may_wait(s, k, slots, last, held)]
    native = _native.Program(
        [(r, dead.get(k, [])) for k, r in enumerate(runners)], sums if may_wait else None, may_wait
    )
    blank = (None,) * (len(slots) - len(numbers_in) + 1)
    return Program(native.run, len(slots), numbers_in, numbers_out, blank), slots


def _sums_may_wait(step: Step, number: int, slots: SlotMap, last: Mapping[int, int], held: Container[int]) -> bool:
    """Whether a step has column sums, and all are results of the program that no later step reads."""
    places = [slots[r] for r in step.sums()]
    return bool(places) and all(p in held and last[p] == number for p in places)


def _runner(step: Step, slots: SlotMap, kernels: Mapping[str, KernelFunction], dying: Container[int]) -> Runner:
    task = step.task
    if isinstance(task, KernelPlan):
        computes = bool(task.description.stores or task.description.sums)
        return _kernel_step(task, kernels[task.description.key] if computes else None, slots, dying)
    if isinstance(task, (OpForward, OpGradient)):
        return _op_step(step, task, slots)
    if isinstance(task, FusionTask):
        return _fusion_step(step, task, slots)
    if isinstance(task, CastTask):
        return _cast_step(step, task, slots)
    assert isinstance(task, AddTask)
    return _add_step(step, slots)


def descriptions(steps: Iterable[Step]) -> dict[str, KernelDescription]:
    """The kernels that steps need, by key."""
    found: dict[str, KernelDescription] = {}
    for step in steps:
        if isinstance(step.task, KernelPlan):
            d = step.task.description
            if d.stores or d.sums:
                found[d.key] = d
    return found


def kernel_sizes(plan: Plan) -> dict[str, tuple[int, int, int]]:
    """Description key -> rows, batch_inner and samples of the kernel's call; where it has several, of the largest."""
    found: dict[str, tuple[int, int, int]] = {}
    for step in (*plan.forward, *plan.backward):
        if isinstance(step.task, KernelPlan):
            key, spec = step.task.description.key, plan.graph.values[plan.graph.nodes[step.start].input].spec
            sizes = (spec.rows, *batch_layout(spec.shape, step.task.batch_dim))
            found[key] = max(found.get(key, sizes), sizes)
    return found


def kernel_rows(plan: Plan) -> dict[str, int]:
    """Description key -> the rows of the kernel's call, which change within a model where an op gives another shape."""
    return {key: rows for key, (rows, _, _) in kernel_sizes(plan).items()}

"""Opaque ops as tasks: forward, or a node of backward; in one step, or in one that starts and one that waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from te_fuser import _native
from te_fuser.distributed.share import stream_of
from te_fuser.fuser.graph.refs import NOTES, STARTED, Ref
from te_fuser.fuser.steps.step import Bench, Runner, SlotMap, Slots, Step, Task, made_name
from te_fuser.fusions.match import Cost
from te_fuser.ops.base import FusableOperation, Gradient, OpCall, outputs_by_name
from te_fuser.ops.unfused_operation import UnfusedOperation
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.kernels.peers import PeersOf
    from te_fuser.ops.tensor_function import TensorFunction


@record()
class OpTask(Task):
    """A method of an opaque op.

    Attributes:
        gradient: which node of its backward; None: its forward.
        needed: the gradients that somebody needs.
        casts: gradients (by their names in the step) that are wanted in another dtype than the op gives them in.
        phase: "whole"; or "start", which leaves what is under way to the step that waits for it, "wait".
        again: whether it is a forward that runs in backward, where its output was not kept.
        peers: the GPUs that exchange tensors by copies; None: the ProcessGroup does.
    """

    node: Node
    gradient: Gradient | None = None
    needed: frozenset[str] = frozenset()
    casts: tuple[tuple[str, torch.dtype], ...] = ()
    phase: str = "whole"
    again: bool = False
    peers: PeersOf | None = None

    @property
    def identity(self) -> Any:
        return self.gradient, self.needed, self.casts, self.phase, self.again, self.peers

    @property
    def compares(self) -> bool:  # type: ignore[override]
        return self.phase != "start"

    @property
    def hangs(self) -> bool:  # type: ignore[override]
        return self.gradient is not None or self.again

    @property
    def notes(self) -> Ref | None:  # type: ignore[override]
        return Ref(NOTES, self.node.index)

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.phase == "wait"

    @property
    def waiting_method(self) -> str | None:
        """The method that waits for what the other has started; None: the other does all."""
        if self.gradient is not None:
            return self.gradient.wait
        assert isinstance(self.node.op, UnfusedOperation)
        return None if self.node.op.op_wait is None else "op_wait"

    @property
    def started(self) -> Ref:
        """What is under way between the two steps of one that starts and waits."""
        return Ref(STARTED, self.node.index, name=self.method)

    @property
    def method(self) -> str:
        """The op's method: that which starts, where there are two."""
        return "op_forward" if self.gradient is None else self.gradient.method

    @property
    def call(self) -> str:  # type: ignore[override]
        return "method" if self.plain is None else "function"

    def at(self, node: Node) -> OpTask:
        return OpTask(node, self.gradient, self.needed, self.casts, self.phase, self.again, self.peers)

    @property
    def plain(self) -> TensorFunction | None:
        """The plain function of tensors that the method amounts to."""
        return getattr(getattr(self.node.op, self.method), "plain", None)

    def phases(self, step: Step) -> tuple[Step, ...]:
        """Its step, or the two of an op that starts something and waits for it later.

        What is under way is read by the second: it also counts as reading what the first read, so that none of it dies.
        """
        if self.waiting_method is None:
            return (step,)
        started = (("started", self.started),)
        first = replace(step, name=f"{step.name}.start", outputs=started, task=replace(self, phase="start"))
        second = replace(
            step,
            name=f"{step.name}.wait",
            inputs=(*started, *step.inputs),
            task=replace(self, phase="wait"),
            cost=Cost(launches=0),
            seconds=0.0,
            host=0.0,
            price=None,
        )
        return first, second

    def runner(self, step: Step, bench: Bench) -> Runner:
        """The method's plain function in a native step where it has one."""
        plain = self.plain
        read, made = dict(step.inputs), list(step.outputs)
        simple = self.phase == "whole" and len(made) == 1 and not self.casts
        if plain is None or not simple or any(name not in read for name in plain.reads):
            return OpRunner(step, self, bench.slots)
        reads = [bench.slots[read[name]] for name in plain.reads]
        return _native.FunctionStep(self.node.label, plain.function, reads, [bench.slots[made[0][1]]])


class OpRunner:
    """Runs a method of an opaque op, or one of its two phases."""

    def __init__(self, step: Step, task: OpTask, slots: SlotMap) -> None:
        assert task.notes is not None
        self._task, self._node = task, task.node
        self._forward = task.gradient is None
        method = task.waiting_method if task.waits else task.method
        assert method is not None
        self._function: Callable[..., Any] = getattr(task.node.op, method)
        inputs = {name: slots[r] for name, r in step.inputs}
        self._seed, started = inputs.pop("seed", -1), inputs.pop("started", -1)
        first = inputs["input"] if self._forward else inputs.pop("dy", -1)
        self._first = started if task.phase == "wait" else first
        self._inputs = tuple(inputs.items())
        self._outputs = tuple((name if self._forward else made_name(name), slots[r]) for name, r in step.outputs)
        self._casts = {made_name(name): dtype for name, dtype in task.casts}
        self._notes = slots[task.notes]

    def __call__(self, slots: Slots) -> None:
        node, forward = self._node, self._forward
        call = OpCall({name: slots[k] for name, k in self._inputs}, self._task.needed)
        call.notes = slots[self._notes] or {}
        first = slots[self._first]
        if node.traits.draws:
            call.random = stream_of(
                slots[self._seed], node.draw.stream, first.shape, node.op.batch_dim(), node.draw.share
            )
        if self._task.peers is not None:
            call.transport = self._task.peers.transport()
        if self._task.phase == "wait":
            call.emitted, first = first
        made = self._function(call, first)
        if forward:
            slots[self._notes] = call.notes
        if self._task.phase == "start":
            slots[self._outputs[0][1]] = call.emitted, made
            return
        if forward:
            self._store_forward(slots, call, made)
            return
        for name, k in self._outputs:
            found = gradient_made(node.label, made, name)
            slots[k] = found.to(self._casts[name]) if name in self._casts else found

    def _store_forward(self, slots: Slots, call: OpCall, made: Any) -> None:
        label = self._node.label
        given = values_made(label, self._node.op, made)
        for name, k in self._outputs:
            slots[k] = given[name] if name in given else emission_made(label, call.emitted, name)


def values_made(label: str, op: FusableOperation, made: Any) -> Mapping[str, torch.Tensor]:
    """What an op's forward gave, by name; a tensor that it gave twice is another one the second time, over its memory.

    Raises:
        TypeError: when that is no tensor, or these are not the op's values.
    """
    given = outputs_by_name(op, made, f"{label}: its forward") if op.values else {"output": made}
    found: dict[str, torch.Tensor] = {}
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            which = "" if name == "output" else f" for {name!r}"
            raise TypeError(f"{label}: its forward must return a tensor, got {type(t).__name__}{which}")
        found[name] = t.view_as(t) if any(t is other for other in found.values()) else t
    return found


def emission_made(label: str, made: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """What a forward emitted by that name.

    Raises:
        RuntimeError: when it did not.
    """
    if name not in made:
        raise RuntimeError(f"{label} declares {name!r} but did not emit it; call emit({name!r}, tensor) in its forward")
    return made[name]


def gradient_made(label: str, made: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor:
    """The gradient that a backward gave by that name.

    Raises:
        RuntimeError, TypeError: when it gave none, or no tensor, or no gradients by name.
    """
    if type(made) is not dict and not isinstance(made, Mapping):  # of a dict the latter takes ten times as long
        raise TypeError(f"{label}: its backward must return a dict of gradients by name, got {type(made).__name__}")
    found = made.get(name)
    if found is None:
        raise RuntimeError(f"{label}: its backward gave no gradient for {name!r}, which is needed")
    if not isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise TypeError(f"{label}: its backward must give a tensor as the gradient of {name!r}, got {kind}")
    return found

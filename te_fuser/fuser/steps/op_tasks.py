"""Methods of ops and registered fusions as tasks, in one step, or in one that starts and one that waits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser import _native
from te_fuser.distributed.shard import stream_of
from te_fuser.fuser.graph.refs import NOTES, STARTED, Ref
from te_fuser.fuser.steps.step import Bench, Called, Runner, SlotMap, Slots, Step, Task, made_name
from te_fuser.fusions.match import Body, ByBlocks, Cost, FusionCall, Match
from te_fuser.ops.base import FusableOperation, Gradient, OpCall, outputs_by_name
from te_fuser.ops.operations import UnfusedOperation, by_name
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fusions.registry import Fusion
    from te_fuser.kernels.peers import PeersOf
    from te_fuser.ops.tensor_function import TensorFunction


@record()
class OpTask(Task):
    """A method of an opaque op."""

    node: Node
    gradient: Gradient | None = None  # a node of its backward; None: its forward
    needed: frozenset[str] = frozenset()
    casts: tuple[tuple[str, torch.dtype], ...] = ()  # gradients wanted in another dtype than the op's
    phase: str = "whole"  # "whole", or "start", which leaves what is under way to "wait"
    again: bool = False  # a forward that runs in backward, where its output was not kept
    peers: PeersOf | None = None  # by copies; None: by the ProcessGroup

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
        """Ref of what is under way between the step that starts and the one that waits."""
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
        """The plain function of tensors that the method is, if any."""
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
            given = values_made(node.label, node.op, made)
            for name, k in self._outputs:
                slots[k] = given[name] if name in given else emission_made(node.label, call.emitted, name)
            return
        for name, k in self._outputs:
            found = gradient_made(node.label, made, name)
            slots[k] = found.to(self._casts[name]) if name in self._casts else found


def values_made(label: str, op: FusableOperation, made: Any) -> Mapping[str, torch.Tensor]:
    """Tensors that an op's forward gave, by name; of one that it gave twice, the second is a view."""
    given = outputs_by_name(op, made, f"{label}: its forward") if op.values else {"output": made}
    found: dict[str, torch.Tensor] = {}
    for name, t in given.items():
        if not isinstance(t, torch.Tensor):
            which = "" if name == "output" else f" for {name!r}"
            raise TypeError(f"{label}: its forward must return a tensor, got {type(t).__name__}{which}")
        found[name] = t.view_as(t) if any(t is other for other in found.values()) else t
    return found


def emission_made(label: str, made: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Tensor that a forward emitted by that name; RuntimeError when it did not."""
    if name not in made:
        raise RuntimeError(f"{label} declares {name!r} but did not emit it; call emit({name!r}, tensor) in its forward")
    return made[name]


def gradient_made(label: str, made: Mapping[str, torch.Tensor | None], name: str) -> torch.Tensor:
    """The gradient that a backward gave by that name."""
    if type(made) is not dict and not isinstance(made, Mapping):  # of a dict the latter takes ten times as long
        raise TypeError(f"{label}: its backward must return a dict of gradients by name, got {type(made).__name__}")
    found = made.get(name)
    if found is None:
        raise RuntimeError(f"{label}: its backward gave no gradient for {name!r}, which is needed")
    if not isinstance(found, torch.Tensor):
        kind = type(found).__name__
        raise TypeError(f"{label}: its backward must give a tensor as the gradient of {name!r}, got {kind}")
    return found


class RowProduct(NamedTuple):
    """A native product of rows: its `make`, and the names of what it takes, in order, and gives."""

    make: Callable[..., Any]
    takes: tuple[str, ...]
    gives: tuple[str, ...]


@record()
class FusionTask(Task):
    """A registered fusion in one direction.

    Attributes:
        gradient: which node of a backward fusion whose nodes run apart.
        body: what was chosen to run here; None: what the fusion declares.
        covered: what a fusion that launches kernels written by hand sees of the ops that this direction covers.
        by_blocks: whether it runs with a tensor that comes by blocks, as its body can.
    """

    what = "fusion"

    fusion: Fusion
    direction: str
    nodes: tuple[Node, ...]
    needed: frozenset[str] = frozenset()
    gradient: Gradient | None = None
    body: Body | None = None
    covered: Match | None = None
    by_blocks: bool = False

    @property
    def identity(self) -> Any:
        return self.fusion, self.direction, self.needed, self.gradient, self.body, self.written, self.by_blocks

    @functools.cached_property
    def written(self) -> tuple[WrittenKernel, ...]:  # type: ignore[override]
        if self._blocks is not None:
            return self._blocks.written
        if self.fusion.compiles is None or self.covered is None:
            return ()
        return tuple(self.fusion.asked("compiles", self.covered, self.direction, self.needed))

    @property
    def _blocks(self) -> ByBlocks | None:
        return self.body.by_blocks if self.by_blocks and self.body is not None else None

    @property
    def own_memory(self) -> bool:  # type: ignore[override]
        return self.body is not None and self.body.plain

    @property
    def hangs(self) -> bool:  # type: ignore[override]
        return self.gradient is not None

    @property
    def call(self) -> str:  # type: ignore[override]
        if self.own_memory:
            return "product"
        return "function" if self._takes() else "method"

    def runner(self, step: Step, bench: Bench) -> Runner:
        """A native step where its body is a plain function of tensors, else a `FusionRunner`."""
        fusion, slots, takes = self.fusion, bench.slots, self._takes()
        if not takes:
            return FusionRunner(step, self, slots)
        read, made = dict(step.inputs), {made_name(name): slots[r] for name, r in step.outputs}
        missing = [name for name in takes if name not in read]
        if missing:
            raise ValueError(
                f"fusion {fusion.name!r} takes {missing[0]!r}, which it has not (there are {sorted(read)})"
            )
        inputs = [slots[read[name]] for name in takes]
        return _native.FunctionStep(
            f"fusion {fusion.name}", self.function(), inputs, [made.get(name, -1) for name in self._gives()]
        )

    def called(self, step: Step) -> Called | None:
        takes, read = self._takes(), dict(step.inputs)
        # What has memory of its own is a native product, which runs in the loop.
        if self.own_memory or not takes or any(name not in read for name in takes):
            return None
        alone = len(step.outputs) == len(self._gives()) == 1
        return Called(self.function(), tuple(read[name] for name in takes)) if alone else None

    @property
    def row_product(self) -> RowProduct | None:  # type: ignore[override]
        """Native product that it runs as, if each row depends on that row alone."""
        if self.body is None or not self.body.by_rows:
            return None
        return RowProduct(self.body.function, self._takes(), self._gives())

    def _gives(self) -> tuple[str, ...]:
        return self.fusion.gives if self.gradient is None else self.gradient.produces

    def _takes(self) -> tuple[str, ...]:
        """The tensors that its body is a plain function of; none: it is called with what it covers."""
        if self.gradient is not None:
            return self.gradient.takes
        if self.fusion.direction == "joint" and self.direction == "backward":
            return ()
        return tuple([taken for name in self.fusion.takes for taken in self.forms_of(self._from_start(name))])

    def forms_of(self, name: str) -> tuple[str, ...]:
        """Names of what it takes for a tensor: the tensor, or its blocks."""
        blocks = self._blocks
        return (name,) if blocks is None or name != blocks.name else blocks.names

    @property
    def takes_blocks(self) -> ByBlocks | None:  # type: ignore[override]
        blocks = None if self.body is None or self.by_blocks else self.body.by_blocks
        return blocks if blocks is not None and blocks.needs <= self.needed else None

    def taking_blocks(self) -> FusionTask:
        return self if self.takes_blocks is None else replace(self, by_blocks=True)

    def giving_blocks(self, names: Sequence[str], blocks: ByBlocks) -> FusionTask | None:
        """The backward with these outputs by blocks, if its body can give them."""
        able = None if self.body is None or self.gradient is not None else self.body.in_blocks
        if able is None or not set(names) <= set(able.names):
            return None
        if (blocks.dtype, blocks.layouts) != (able.dtype, able.layouts):
            return None
        return replace(self, needed=self.needed.union(f"{n}.{layout}" for n in names for layout in blocks.layouts))

    def _from_start(self, name: str) -> str:
        """A name that may count ops from the end, by their number from the beginning."""
        if not name.startswith("-"):
            return name
        number, _, rest = name.partition(".")
        return f"{len(self.nodes) + int(number)}.{rest}"

    def runs_by(self) -> str:
        return self.body.describe() if self.body is not None and self.body.describe is not None else ""

    def function(self) -> Callable[..., Any]:
        """Function chosen here, or declared: a plain one of tensors, or a body of (m, x)."""
        if self._blocks is not None:
            return self._blocks.function
        if self.body is not None:
            return self.body.function
        declared = self.fusion.run_forward if self.direction == "forward" else self.fusion.run_backward
        assert declared is not None
        return declared if self.gradient is None else getattr(declared, self.gradient.method)  # type: ignore[no-any-return]


class FusionRunner:
    """Runs a registered fusion in one direction."""

    def __init__(self, step: Step, task: FusionTask, slots: SlotMap) -> None:
        self._forward = task.direction == "forward"
        self._function = task.function()
        self._ops = tuple(n.op for n in task.nodes)
        self._needed = task.needed
        self._inputs = tuple((name, slots[r]) for name, r in step.inputs)
        self._first = dict(self._inputs)[task.forms_of("input" if self._forward else "dy")[0]]
        self._outputs = tuple((name, slots[r]) for name, r in step.outputs)
        self._streams = tuple((k, n) for k, n in enumerate(task.nodes) if n.traits.draws)
        self._shared = frozenset(
            [k for k, n in self._streams if n.draw.share is not None and n.draw.share.ranks_draw_apart]
        )
        self._label = f"fusion {task.fusion.name!r} over {', '.join(n.label for n in task.nodes)}"

    def __call__(self, slots: Slots) -> None:
        tensors = {name: slots[k] for name, k in self._inputs}
        first = slots[self._first]
        streams = {}
        for k, node in self._streams:
            # Read only when somebody draws from it: a seed on a GPU is waited for.
            where = first.shape, node.op.batch_dim(), node.draw.share
            streams[k] = functools.partial(stream_of, tensors["seed"], node.draw.stream, *where)
        call = FusionCall(self._ops, tensors, self._needed, streams, self._shared)
        result = self._function(call, first)
        if not self._forward:
            made = by_name(self._label, result)
            for name, k in self._outputs:
                slots[k] = gradient_made(self._label, made, name)
            return
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"{self._label}: its forward must return a tensor, got {type(result).__name__}")
        for name, k in self._outputs:
            slots[k] = result if name == "output" else emission_made(self._label, call.made, name)

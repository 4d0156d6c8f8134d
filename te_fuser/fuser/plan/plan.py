"""Plans as data: segments with their steps in both directions, what is kept in between, and why it came out so."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from te_fuser.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from te_fuser.codegen.cuda_source_kernel import WrittenKernel
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.graph.refs import Ref
    from te_fuser.fuser.plan.device import Device, Host
    from te_fuser.fuser.plan.prices import CostModel
    from te_fuser.fuser.steps.step import Step
    from te_fuser.ops.base import Spec


class SavedTensor(NamedTuple):
    """A tensor kept for backward, its bytes (0: in another's memory), and whose it is."""

    ref: Ref
    name: str
    bytes: int
    owner: str  # "activation", "statistic", "input", "parameter", "tensor"


class Refusal(NamedTuple):
    """Something that was considered for the ops start..stop-1 and not taken, and why."""

    direction: str
    start: int
    stop: int
    name: str
    reason: str


@record()
class Choice:
    """Choice to keep a value or to compute it again, with the cost of the alternative."""

    value: str
    recomputed: bool
    bytes: int
    seconds: float
    root: int = -1

    def __str__(self) -> str:
        if self.recomputed:
            return (
                f"{self.value}: computed again in backward, +{self.seconds * 1e6:.1f} us, saves {size_text(self.bytes)}"
            )
        return f"{self.value}: kept, {size_text(self.bytes)}; computing it again would cost {self.seconds * 1e6:.1f} us"


# Seconds that a kept byte is worth, in passes over it at copy speed: balanced computes a value again when that costs
# at most two passes over the bytes it saves. Most values cost one pass for each of their bytes, so the price alone
# would take all or nothing: balanced then keeps again what is dearest for its bytes, up to half of what it had saved.
LAMBDA = {"fast": 0.0, "balanced": 2.0, "lean": 8.0}
DIRECTIONS = ("forward", "backward")
_SHOWN = 12  # steps of each direction, where a plan stands for itself in a console
_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def size_text(count: float) -> str:
    """Bytes for people: 64.00 MiB, 12 B."""
    name, unit = next((u for u in _UNITS if count >= u[1]), _UNITS[-1])
    return f"{count / unit:.0f} B" if unit == 1.0 else f"{count / unit:.2f} {name}"


@dataclass(frozen=True)
class SegmentPlan:
    """The ops start..stop-1: one autograd node, or several of PyTorch's own.

    Attributes:
        forward, backward: its steps in running order; no backward where nobody needs a gradient.
        values_in, values_out: values of the graph that enter and leave it.
        parameters: the graph's parameters that it reads, or gives a gradient of.
        takes, gives: what enters it (values, parameters, the seed) and what leaves it.
        arriving: the gradient of each of `gives`, or the term of it that comes from outside where steps give another;
            None for one that takes none.
        returned: the gradient of each of `takes`; None for one that needs none, or that nothing reaches.
        kept: what its backward reads and does not make.
        recorded: whether its forward steps are PyTorch's functions, which autograd records: then `backward` and `kept`
            are what PyTorch does and keeps.
        delayed: how many steps at the end of `backward` run later, by `backward_dw`.
    """

    start: int
    stop: int
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    values_in: tuple[int, ...]
    values_out: tuple[int, ...]
    parameters: tuple[int, ...]
    takes: tuple[Ref, ...]
    gives: tuple[Ref, ...]
    arriving: tuple[Ref | None, ...]
    returned: tuple[Ref | None, ...]
    kept: tuple[SavedTensor, ...]
    recorded: bool = False
    delayed: int = 0

    @property
    def late(self) -> tuple[Step, ...]:
        return self.backward[len(self.backward) - self.delayed :]

    def steps(self, direction: str) -> tuple[Step, ...]:
        """Steps of one direction: "forward" or "backward"."""
        return self.forward if direction == "forward" else self.backward

    def node(self, direction: str, host: Host) -> float:
        """Seconds of the host for its autograd node."""
        if not self.backward:
            return 0.0
        if self.recorded:
            return host.guard * len(self.gives) if direction == "forward" else 0.0
        if direction == "forward":
            return host.node[0]
        return host.node[1] + host.gradient * (len(self.returned) - self.returned.count(None))


@dataclass(frozen=True)
class Generated:
    """A generated kernel of a plan, with rows, batch_inner and samples of its largest call."""

    description: KernelDescription
    sizes: tuple[int, int, int]


@dataclass(frozen=True)
class Plan:
    """Both plans of one signature.

    Attributes:
        refused: says what else was not taken, while plans are compared: only the one that is chosen has to know.
        before: steps that make parameters of others for all segments; they run first in each call.
    """

    graph: Graph
    segments: tuple[SegmentPlan, ...]
    device: Device
    target: str
    memory: str
    refusals: tuple[Refusal, ...] = ()
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    refused: Callable[[], Iterable[Refusal]] = tuple
    before: tuple[Step, ...] = ()

    def __repr__(self) -> str:
        """A line for each of the first steps; `model.explain(x)` has them all."""
        lines = [f"Plan of {len(self.graph.nodes)} ops, input {list(self.x.shape)}, on {self.device.name}"]
        for direction, steps in (("forward", self.forward), ("backward", self.backward)):
            lines += [direction, *(f"  {step}" for step in steps[:_SHOWN])] if steps else []
            lines += [f"  ... and {len(steps) - _SHOWN} more"] if len(steps) > _SHOWN else []
        return "\n".join(lines)

    @functools.cached_property
    def forward(self) -> tuple[Step, ...]:
        return *self.before, *[s for segment in self.segments for s in segment.forward]

    @functools.cached_property
    def backward(self) -> tuple[Step, ...]:
        return tuple([s for segment in reversed(self.segments) for s in segment.backward])

    @property
    def steps(self) -> tuple[Step, ...]:
        return *self.forward, *self.backward

    @functools.cached_property
    def kept(self) -> tuple[SavedTensor, ...]:
        """Tensors kept between forward and backward; of several in one memory, only the first has bytes."""
        found: dict[Ref, SavedTensor] = {}
        counted: set[Ref] = set()
        for entry in (k for segment in reversed(self.segments) for k in segment.kept):
            if entry.ref not in found:
                memory = self.graph.stored(entry.ref)
                found[entry.ref] = entry._replace(bytes=0) if memory in counted else entry
                counted.add(memory)
        return tuple(found.values())

    @functools.cached_property
    def generated(self) -> dict[str, Generated]:
        """Description key -> a generated kernel that it launches."""
        found: dict[str, Generated] = {}
        for step in self.steps:
            description = step.task.description
            sizes = step.task.sizes(self.graph.values[self.graph.nodes[step.start].input].spec)
            if description is not None and sizes is not None:
                known = found.get(description.key)
                found[description.key] = Generated(description, max(known.sizes, sizes) if known else sizes)
        return found

    @property
    def written(self) -> tuple[WrittenKernel, ...]:
        """The kernels written by hand that it launches, each once."""
        return tuple(dict.fromkeys([kernel for s in self.steps for kernel in s.task.written]))

    @property
    def x(self) -> Spec:
        return self.graph.values[0].spec

    def kept_bytes(self, owner: str = "activation") -> int:
        """Bytes kept for backward that this model allocated (parameters and the call's own inputs apart)."""
        return sum([k.bytes for k in self.kept if k.owner == owner])

    def seconds(self, *directions: str) -> float:
        """Predicted time of some directions, both by default: a GPU works beside its host, a CPU is its own."""
        return math.fsum(map(self._seconds, directions or DIRECTIONS))

    def _seconds(self, direction: str) -> float:
        device, host = self.device_seconds(direction), self.host_seconds(direction)
        return device + host if self.device.kind == "cpu" else max(device, host)

    def device_seconds(self, *directions: str) -> float:
        """Predicted time of the device; a CPU's steps have their calls beside it."""
        calls = -1.0 if self.device.kind == "cpu" else 0.0
        parts = itertools.product(self.segments, directions or DIRECTIONS)
        first = math.fsum([s.seconds + calls * s.host for s in self._first(directions)])
        return first + math.fsum([s.seconds + calls * s.host for p, d in parts for s in p.steps(d)])

    def host_seconds(self, *directions: str) -> float:
        """Predicted time of the host's calls in some directions, both by default."""
        parts = itertools.product(self.segments, directions or DIRECTIONS)
        first = math.fsum([s.host for s in self._first(directions)])
        of_nodes = [p.node(d, self.device.host) + math.fsum([s.host for s in p.steps(d)]) for p, d in parts]
        return first + math.fsum(of_nodes)

    def _first(self, directions: tuple[str, ...]) -> tuple[Step, ...]:
        return self.before if "forward" in (directions or DIRECTIONS) else ()

    @property
    def waits_for_host(self) -> bool:
        """True where a GPU would wait for its host in one of the directions."""
        on_gpu = self.device.kind != "cpu"
        return on_gpu and any(self.host_seconds(d) > self.device_seconds(d) for d in DIRECTIONS)

    def changed(self, change: Callable[[SegmentPlan, str], Iterable[Step]]) -> Plan:
        """The plan with these steps in place of those of each segment and direction."""
        segments = []
        for segment in self.segments:
            forward, backward = (tuple(change(segment, direction)) for direction in DIRECTIONS)
            segments.append(replace(segment, forward=forward, backward=backward))
        return replace(self, segments=tuple(segments))

    def seen_by(self, prices: CostModel) -> Plan:
        """The plan with bytes and times by these prices."""
        priced = self.changed(lambda segment, direction: map(prices.priced, segment.steps(direction)))
        kept = [tuple([k._replace(bytes=prices.size(k.ref)) for k in s.kept]) for s in self.segments]
        segments = tuple(replace(s, kept=k) for s, k in zip(priced.segments, kept, strict=True))
        choices = tuple(replace(c, bytes=prices.size(prices.graph.ref(c.root))) for c in self.choices)
        before = tuple(map(prices.priced, self.before))
        return replace(self, graph=prices.graph, segments=segments, choices=choices, before=before)

    def chosen(self) -> Plan:
        """The plan with its refusals listed: everything that was not taken."""
        return replace(self, refusals=(*self.refused(), *self.refusals), refused=tuple)

    def noted(self, *notes: str) -> Plan:
        return replace(self, notes=(*self.notes, *notes)) if notes else self

"""Plans as data: steps of the two directions, what is kept in between, and why it came out so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Union

import torch

from te_fuser.fuser.device import Device
from te_fuser.fuser.graph import Graph, Node
from te_fuser.fuser.refs import Ref
from te_fuser.fuser.stretch import KernelPlan
from te_fuser.fusions.match import Cost
from te_fuser.fusions.registry import Fusion
from te_fuser.ops.base import Gradient, Spec


@dataclass(frozen=True)
class OpForward:
    """An opaque op's own forward."""

    node: Node


@dataclass(frozen=True)
class OpGradient:
    """One node of an opaque op's backward."""

    node: Node
    gradient: Gradient
    needed: frozenset[str]


@dataclass(frozen=True)
class FusionTask:
    """A registered fusion in one direction over the ops start..stop-1.

    Attributes:
        gradient: which node of a backward fusion whose nodes run apart.
        body: the plain function of tensors that was chosen to run here; None: what the fusion declares.
    """

    fusion: Fusion
    direction: str
    nodes: tuple[Node, ...]
    needed: frozenset[str] = frozenset()
    gradient: Gradient | None = None
    body: Callable[..., Any] | None = None


@dataclass(frozen=True)
class AddTask:
    """Adds up the contributions to one gradient."""


@dataclass(frozen=True)
class CastTask:
    """A parameter in another dtype, for autocast."""

    dtype: torch.dtype


Task = Union[KernelPlan, OpForward, OpGradient, FusionTask, AddTask, CastTask]  # noqa: UP007 - a type alias at run time


@dataclass(frozen=True)
class Step:
    """One entry of a plan.

    Attributes:
        name: the kernel or library call.
        start, stop: the ops it covers.
        inputs, outputs: (name, ref) of what it reads and makes.
        cost, seconds: what it moves and computes, and the predicted time.
        chain: in backward, whether the next step's gradient depends on it.
    """

    name: str
    start: int
    stop: int
    inputs: tuple[tuple[str, Ref], ...]
    outputs: tuple[tuple[str, Ref], ...]
    task: Task
    cost: Cost
    seconds: float
    chain: bool = True

    def reads(self) -> list[Ref]:
        """The refs it reads."""
        return [r for _, r in self.inputs]

    def writes(self) -> list[Ref]:
        """The refs it makes."""
        return [r for _, r in self.outputs]

    def sums(self) -> list[Ref]:
        """Those of them that are column sums whose last addition may wait, as far as the step itself is concerned."""
        if isinstance(self.task, KernelPlan):
            return [o.ref for o in self.task.outputs[len(self.task.description.stores) :]]
        declared = self.task.fusion.sums if isinstance(self.task, FusionTask) else ()
        return [r for name, r in self.outputs if name in declared]


@dataclass(frozen=True)
class Kept:
    """A tensor kept between forward and backward, its bytes (0: in the memory of another one), and whose it is."""

    ref: Ref
    name: str
    bytes: int
    owner: str  # "activation", "statistic", "input", "parameter"


@dataclass(frozen=True)
class Refusal:
    """Something that was considered for the ops start..stop-1 and not taken, and why."""

    direction: str
    start: int
    stop: int
    name: str
    reason: str


@dataclass(frozen=True)
class Choice:
    """Whether a value is kept or computed again, and what the other would have cost."""

    value: str
    recomputed: bool
    bytes: int
    seconds: float
    root: int = -1

    @property
    def dearness(self) -> float:
        """Seconds that computing it again takes, per byte that this saves."""
        return self.seconds / max(self.bytes, 1)

    def __str__(self) -> str:
        if self.recomputed:
            return (
                f"{self.value}: computed again in backward, +{self.seconds * 1e6:.1f} us, saves {size_text(self.bytes)}"
            )
        return f"{self.value}: kept, {size_text(self.bytes)}; computing it again would cost {self.seconds * 1e6:.1f} us"


_UNITS = (("GiB", 2.0**30), ("MiB", 2.0**20), ("KiB", 2.0**10), ("B", 1.0))


def size_text(count: float) -> str:
    """Bytes for people: 64.00 MiB, 12 B."""
    name, unit = next((u for u in _UNITS if count >= u[1]), _UNITS[-1])
    return f"{count / unit:.0f} B" if unit == 1.0 else f"{count / unit:.2f} {name}"


@dataclass(frozen=True)
class Plan:
    """Both plans of one signature."""

    graph: Graph
    forward: tuple[Step, ...]
    backward: tuple[Step, ...]
    kept: tuple[Kept, ...]
    segments: tuple[tuple[int, int], ...]
    device: Device
    kernels: str
    memory: str
    refusals: tuple[Refusal, ...] = ()
    choices: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def x(self) -> Spec:
        """Shape, dtype and device of the main input."""
        return self.graph.values[0].spec

    def kept_bytes(self, owner: str = "activation") -> int:
        """Bytes kept for backward that this model allocated (parameters and the call's own inputs apart)."""
        return sum(k.bytes for k in self.kept if k.owner == owner)

    def seconds(self) -> float:
        """Predicted time of both directions."""
        return sum(s.seconds for s in (*self.forward, *self.backward))

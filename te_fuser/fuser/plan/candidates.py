"""Candidates of either direction: a step or more for a range of ops, what it costs, and why something is none."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from te_fuser.fuser.graph.refs import Ref, saved_ref
from te_fuser.fuser.plan.plan import Refusal
from te_fuser.fuser.plan.prices import NOTHING
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.op_tasks import FusionTask
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.match import Body, Match
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.kernel_cache import DerivedStretch
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.plan.sections import Section
    from te_fuser.fusions.registry import Fusion
    from te_fuser.ops.base import Gradient

MatchOf = tuple["Fusion", tuple[int, int]]  # a fusion where it matches
# Seconds: lengths of edges are whole numbers of it, so that equal layers tie exactly and get equal plans.
TICK = 1e-13
NO_TENSOR = "its last op makes no tensor of its own"


@record(eq=False)
class Edge:
    """A candidate: steps for the ops start..stop-1."""

    start: int
    stop: int
    name: str
    steps: tuple[Step, ...]
    kept: int = 0  # bytes that it makes kept for backward
    fusion: Fusion | None = None
    whole: tuple[int, int] | None = None  # the match of a fusion, of which it covers a part
    recomputes: tuple[Ref, ...] = ()
    in_forward: tuple[float, float] = NOTHING  # of seconds, the host's too, for what it makes kept

    @functools.cached_property
    def takes(self) -> tuple[float, float]:
        """Seconds of its steps, and those of the host."""
        return math.fsum([s.seconds for s in self.steps]), math.fsum([s.host for s in self.steps])

    @property
    def match(self) -> MatchOf | None:
        return None if self.fusion is None or self.whole is None else (self.fusion, self.whole)

    @property
    def is_joint(self) -> bool:
        return self.fusion is not None and self.fusion.direction == "joint"


@dataclass(eq=False)
class Found:
    """The candidates of a section, whatever they are to be short in.

    Attributes:
        rows: by stretch the kernels of its ranges, each in several variants.
        lone: by stretch those of lone ops, for where a range has none.
        others: of opaque ops and of fusions.
        refusals: what is no candidate, and why; each once, in their order.
        demand_unmet: whether another backward plan could turn one of these into a candidate.
    """

    section: Section
    rows: list[list[list[Edge]]] = field(default_factory=list)
    lone: list[list[list[Edge]]] = field(default_factory=list)
    others: list[Edge] = field(default_factory=list)
    refusals: dict[Refusal, None] = field(default_factory=dict)
    demand_unmet: bool = False

    @property
    def edges(self) -> Iterator[Edge]:
        for group in (*self.rows, *self.lone, [self.others]):
            for edges in group:
                yield from edges

    def refuse(self, direction: str, start: int, stop: int, name: str, reason: str) -> None:
        self.refusals[Refusal(direction, start, stop, name, reason)] = None


@dataclass(frozen=True)
class Withheld:
    """Values, statistics and emissions of ops that a forward cover already chosen cannot give."""

    forbidden: frozenset[int] = frozenset()
    given: frozenset[int] = frozenset()
    silent: frozenset[int] = frozenset()


def find_rows(problem: Problem, found: Found, derive: Callable[[Found, DerivedStretch, int, int], list[Edge]]) -> None:
    """Add the kernels of every sub-range worth one, and of lone ops where one cannot be had as it is."""
    for number in found.section.stretches:
        stretch, ranges = problem.stretch_of(problem.stretches[number][0]), problem.ranges[number]
        rows = [derive(found, stretch, a, b) for a, b in ranges]
        found.rows.append(rows)
        all_there = all(any(not e.recomputes for e in variants) for variants in rows)
        lone = set() if all_there else {(i, i + 1) for i in range(stretch.start, stretch.stop)} - set(ranges)
        found.lone.append([derive(found, stretch, a, b) for a, b in sorted(lone)])


class Placed(NamedTuple):
    """Candidates of one section in another one that is like it, `by` ops later, or in its own."""

    edges: tuple[Edge, ...]
    here: Section
    there: Section
    by: int

    @property
    def refs(self) -> Mapping[Ref, Ref]:
        """Map from the refs of section `here` to those at their places in section `there`."""
        return self.here.refs_in(self.there)

    def moved(self, prices: Prices) -> Sequence[Edge]:
        """Candidates at their places in section `there`, with the costs that their steps have in `here`."""
        if not self.by:
            return self.edges
        return [prices.once((e, self.there), functools.partial(self._edge, prices, e)) for e in self.edges]

    def _edge(self, prices: Prices, edge: Edge) -> Edge:
        by, whole = self.by, edge.whole
        if whole is not None:
            whole = whole[0] + by, whole[1] + by
        again = tuple(map(self.refs.__getitem__, edge.recomputes))
        steps = tuple([self._step(prices, step, whole) for step in edge.steps])
        start, stop = edge.start + by, edge.stop + by
        return Edge(start, stop, edge.name, steps, edge.kept, edge.fusion, whole, again, edge.in_forward)

    def _step(self, prices: Prices, step: Step, whole: tuple[int, int] | None) -> Step:
        """The step at its place there; `whole`: the ops that its fusion matches there, if it is one's."""
        problem, task, by, refs = prices.problem, step.task, self.by, self.refs
        start, stop, nodes = step.start + by, step.stop + by, problem.nodes
        if isinstance(task, KernelTask):
            later = nodes[self.there.start].draw.stream - nodes[self.here.start].draw.stream
            task = task.moved(refs.__getitem__, later)
            if task.aliases:  # what they are called, the place says
                return prices.kernel_step(task, start, stop, step.price)
        elif isinstance(task, FusionTask):
            assert whole is not None
            task = _moved_fusion(problem, whole, by, task, nodes[start:stop])
        else:
            task = task.at(nodes[start])
        inputs = tuple([(name, refs[r]) for name, r in step.inputs])
        outputs = tuple([(name, refs[r]) for name, r in step.outputs])
        taken = step.cost, step.seconds, step.host
        return Step(step.name, start, stop, inputs, outputs, task, *taken, step.chain, step.price)


def _moved_fusion(
    problem: Problem, whole: tuple[int, int], by: int, task: FusionTask, nodes: tuple[Node, ...]
) -> FusionTask:
    """A fusion of the ops `whole`, chosen anew if the choice may have seen a parameter."""
    if any(op.looked for op in problem.match(whole[0] - by, whole[1] - by).ops):
        return fusion_task(
            problem, task.fusion, task.direction, nodes, problem.match(*whole), task.needed, task.gradient
        )
    return replace(task, nodes=nodes)


def fusion_task(
    problem: Problem,
    fusion: Fusion,
    direction: str,
    nodes: tuple[Node, ...],
    match: Match,
    needed: frozenset[str] = frozenset(),
    gradient: Gradient | None = None,
) -> FusionTask:
    """A direction of a fusion over the ops that it covers, or one node of its backward."""
    method = direction if gradient is None else gradient.method
    answer = fusion.asked("choose", match, method) if fusion.choose is not None else None
    body = answer if answer is None or isinstance(answer, Body) else Body(answer)
    if body is not None and not callable(body.function):
        raise TypeError(
            f"fusion {fusion.name!r}: its `choose` gives {body.function!r}, not a function or a Body of one"
        )
    covered = problem.match(nodes[0].index, nodes[-1].index + 1) if fusion.compiles is not None else None
    return FusionTask(fusion, direction, nodes, needed, gradient, body, covered)


def saved_by(fusion: Fusion, whole: tuple[int, int]) -> list[tuple[str, Ref]]:
    """Tensors, by name, that a joint fusion that matches the ops `whole` saves for its own backward."""
    if not fusion.saves:
        return []
    start, _ = fusion.covers("forward", *whole)
    return [(name, saved_ref(start, fusion.name, name)) for name in fusion.saves]

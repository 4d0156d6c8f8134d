"""Candidates of either direction: a step or more for a range of ops, what it costs, and why something is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import SEED, Ref, saved_ref
from te_fuser.fuser.plan.plan import Choice, Refusal
from te_fuser.fuser.steps.fusion_task import FusionTask
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions.match import Body, Match

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.derivation import DerivedStretch
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step
    from te_fuser.fusions.registry import Fusion
    from te_fuser.ops.base import Gradient

# Seconds: lengths of edges are whole numbers of it, so that equal layers tie exactly and get equal plans.
TICK = 1e-13
NO_TENSOR = "its last op makes no tensor of its own"


@dataclass(frozen=True)
class Edge:
    """A candidate: steps for the ops start..stop-1, and its cost including what it makes kept.

    `whole` is where the match of a fusion is, of which it covers start..stop-1. `ahead` are the ticks of forward that
    a candidate for backward stands for, where covers are to be compared by both directions.
    """

    start: int
    stop: int
    name: str
    steps: tuple[Step, ...]
    weight: float
    fusion: Fusion | None = None
    whole: tuple[int, int] | None = None
    recomputes: tuple[Ref, ...] = ()
    choices: tuple[Choice, ...] = ()
    ahead: int = 0

    @property
    def is_joint(self) -> bool:
        """Whether it is one direction of a joint fusion."""
        return self.fusion is not None and self.fusion.direction == "joint"

    @property
    def length(self) -> int:
        """The weight in ticks; a tie goes to the registered fusion, then to the earlier candidate."""
        return max(10 * round(self.weight / (10 * TICK)) + (0 if self.fusion else 1), 0)

    @property
    def compared(self) -> int:
        """What covers are compared by, in ticks: the length, with forward's share."""
        return max(self.length + self.ahead, 0)


@dataclass
class Withheld:
    """What a forward cover already chosen cannot give: values, statistics of ops, emissions of ops."""

    forbidden: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


@dataclass
class Ledger:
    """What one round of planning did not take, and whether another backward plan could change that."""

    refusals: dict[Refusal, None] = field(default_factory=dict)  # each once, in their order
    demand_unmet: bool = False

    def refuse(self, direction: str, start: int, stop: int, name: str, reason: str) -> None:
        """Note why something is no candidate, or lost."""
        self.refusals[Refusal(direction, start, stop, name, reason)] = None

    def add(self, other: Ledger) -> None:
        """Note what another one has."""
        self.refusals |= other.refusals
        self.demand_unmet |= other.demand_unmet

    def refuse_for_demand(self, fusion: Fusion, start: int, stop: int, reason: str) -> None:
        """A no that another backward plan could turn into a yes."""
        self.demand_unmet = True
        self.refuse(fusion.direction, start, stop, fusion.name, reason)


def row_edges(problem: Problem, derive: Callable[[DerivedStretch, int, int], Edge | None]) -> list[Edge]:
    """The kernels of every sub-range worth one, and of lone ops where there is none."""
    found: list[Edge] = []
    for stretch, ranges in zip(problem.stretches, problem.ranges, strict=True):
        edges = {(a, b): derive(stretch, a, b) for a, b in ranges}
        if None in edges.values():
            lone = {(i, i + 1) for i in range(stretch.start, stretch.stop)}
            edges |= {(a, b): derive(stretch, a, b) for a, b in sorted(lone - set(edges))}
        found += [edge for edge in edges.values() if edge is not None]
    return found


def kernel_step(problem: Problem, prices: Prices, kernel: KernelTask, start: int, stop: int) -> Step:
    """A row kernel as the step for the ops start..stop-1."""
    # The step holds the kernel, so that its id is not given to another one.
    return prices.once(id(kernel), lambda: _kernel_step(problem, prices, kernel, start, stop))


def _kernel_step(problem: Problem, prices: Prices, kernel: KernelTask, start: int, stop: int) -> Step:
    description = kernel.description
    first = problem.nodes[start]
    names = [load.name for load in description.loads]
    outs = [t.name for t in description.stores] + [t.name for t in description.sums]
    inputs = list(zip(names, kernel.inputs, strict=True))
    if description.streams:
        inputs.append(("seed", SEED))
    outputs = list(zip(outs, (o.ref for o in kernel.outputs), strict=True))
    outputs += [(f"= {ref.label(problem.graph)}", new) for new, ref in kernel.aliases]
    made = {r for _, r in outputs}
    inputs += [(f"alias {k}", ref) for k, (_, ref) in enumerate(kernel.aliases) if ref not in made]
    if kernel.lead not in {r for _, r in inputs}:
        inputs.append(("shape", kernel.lead))
    name = description.name if kernel.computes else "alias"
    price = Price("of_kernel", (kernel, first))
    return prices.step(name, (start, stop), inputs, outputs, kernel, price)


def fusion_task(
    problem: Problem,
    fusion: Fusion,
    direction: str,
    nodes: tuple[Node, ...],
    match: Match,
    needed: frozenset[str] = frozenset(),
    gradient: Gradient | None = None,
) -> FusionTask:
    """A direction of a fusion over the ops that it covers, or one node of its backward, where `match` fits."""
    method = direction if gradient is None else gradient.method
    answer = fusion.asked("choose", match, method) if fusion.choose is not None else None
    body = answer if answer is None or isinstance(answer, Body) else Body(answer)
    if body is not None and not callable(body.function):
        raise TypeError(
            f"fusion {fusion.name!r}: its `choose` gives {body.function!r}, not a function or a Body of one"
        )
    covered = problem.match(nodes[0].index, nodes[-1].index + 1) if fusion.compiles is not None else None
    return FusionTask(fusion, direction, nodes, needed, gradient, body, covered)


def saved_by(fusion: Fusion, match: Match, whole: tuple[int, int], prices: Prices) -> list[tuple[str, Ref]]:
    """What a joint fusion that matches the ops `whole` hands to its own backward; its size is known from here on."""
    start, _ = fusion.covers("forward", *whole)
    found = [(name, saved_ref(start, fusion.name, name)) for name in fusion.saves]
    if found:
        prices.learn(fusion, match, found)
    return found

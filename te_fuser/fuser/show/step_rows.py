"""The steps of a plan as rows: what each covers, reads and writes, takes and keeps, and what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_fuser.dtypes import name_of
from te_fuser.fuser.graph.refs import RECOMPUTED, Ref
from te_fuser.fuser.plan.overlap import awaited, said_of
from te_fuser.fuser.plan.plan import Kept, Plan, size_text
from te_fuser.fuser.show.words import count

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.show.measure import Measured
    from te_fuser.fuser.steps.step import Step


@dataclass(frozen=True)
class StepCost:
    """Cost of a step.

    Attributes:
        read, written: predicted bytes.
        seconds: predicted time; `measured` is None where nothing was measured.
        limit: the resource that bounds it: "memory", "products", "arithmetic", "launch", on a CPU also the "host", for
            what ranks send the "link"; "stated" by a fusion.
        share: least time for that resource over the time it takes (measured, else predicted); None if stated.
    """

    read: float
    written: float
    launches: int
    seconds: float
    measured: float | None
    limit: str
    share: float | None


@dataclass(frozen=True)
class StepOutputs:
    """Outputs of a step beside the plain ones.

    Attributes:
        keeps: what it makes that is kept for backward.
        again: what it computes again in backward.
        transposed: what else it stores transposed.
        over: which outputs may be stored over which inputs, in the names of the kernel.
    """

    keeps: tuple[str, ...]
    again: tuple[str, ...]
    transposed: tuple[str, ...]
    over: tuple[str, ...]


@dataclass(frozen=True)
class StepRow(StepCost, StepOutputs):
    """One step as it is shown.

    Attributes:
        ops: the first and the last op it covers.
        covers: those ops by kind and place in the model.
        what: "kernel" (generated), "formula" (by PyTorch operations), "op" (its own code), "fusion", "torch" (a cast or
            a sum of gradients), "no kernel:" (an alias).
        algorithm: what the body of a fusion says that it runs by; empty where that is not known.
        sends: what it sends to other ranks, or what of the wait for that is hidden.
    """

    ops: tuple[int, int]
    covers: tuple[str, ...]
    what: str
    name: str
    algorithm: str
    sends: str


def step_rows(plan: Plan, direction: str, measured: Measured | None = None) -> list[StepRow]:
    """The steps of one direction ("forward", "backward") in running order."""
    steps = plan.forward if direction == "forward" else plan.backward
    times: Sequence[float | None] = measured.of(direction) if measured else [None] * len(steps)
    kept = {k.ref: k for k in plan.kept} if direction == "forward" else {}
    return [_row(plan, step, seconds, kept) for step, seconds in zip(steps, times, strict=True)]


def _row(plan: Plan, step: Step, measured: float | None, kept: dict[Ref, Kept]) -> StepRow:
    nodes = [plan.graph.nodes[k] for k in step.task.ops or range(step.start, step.stop)]
    limit, least = _limit(plan, step, nodes[0])
    taken = step.seconds if measured is None else measured
    description, what = step.task.description, step.task.what
    if description is not None and step.cost.launches == 0:
        what = "no kernel:"
    elif description is not None and plan.target == "torch":
        what = "formula"
    # Their layouts are named by nothing else.
    turned = [r for r in step.writes() if r.form.layout != "rows" and r.kind is not RECOMPUTED and r not in kept]
    held = [kept[r] for r in step.writes() if r in kept]
    keeps = [f"{k.name.rpartition(': ')[2]} ({size_text(k.bytes)})" for k in held if k.owner != "statistic"]
    if len(keeps) < len(held):
        keeps.append(f"{count(len(held) - len(keeps), 'statistic')} of each row")
    return StepRow(
        ops=(step.start, step.stop - 1),
        covers=tuple(place(n) for n in nodes),
        what=what,
        name=step.name,
        read=step.cost.read,
        written=step.cost.written,
        launches=step.cost.launches,
        seconds=step.seconds,
        measured=measured,
        limit=limit,
        share=least / taken if limit != "stated" and taken > 0 and not awaited(step) else None,
        keeps=tuple(keeps),
        again=tuple(r.label(plan.graph) for r in step.writes() if r.kind is RECOMPUTED),
        transposed=tuple(r.label(plan.graph) for r in turned),
        algorithm=step.task.runs_by(),
        over=tuple(f"{store} over {load}" for store, load in description.overwrites) if description else (),
        sends=said_of(plan, step),
    )


def place(node: Node) -> str:
    """An op by kind and path; "1.0.matmul" is the MatMul of the Linear at 1.0: the kind says as much."""
    kind = node.op.kind.__name__
    path = node.path.removesuffix("." + kind.lower())
    return f"{kind} {path}" if path else kind


def _limit(plan: Plan, step: Step, first: Node) -> tuple[str, float]:
    if awaited(step):
        return "link", 0.0
    if step.cost.seconds is not None:
        return "stated", step.cost.seconds
    dtype = name_of(plan.graph.arithmetic(first))
    limits = plan.device.limits(step.cost, dtype)
    calls = {"launch": limits.pop("launch")}
    if plan.device.kind == "cpu":
        calls = {"host": step.host}
    together = limits | calls
    # A launch or a call is a cost, not a limit to come near to: the share is that of the work.
    return max(together, key=lambda name: together[name]), max(limits.values())

"""The order in which steps run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import RECOMPUTED, STARTED, Ref

if TYPE_CHECKING:
    from te_fuser.fuser.plan.candidates import Edge
    from te_fuser.fuser.steps.step import Step


def is_hanging(step: Step) -> bool:
    """Whether a step of backward reads what was computed again, where something was: no later one waits for it."""
    return step.task.hangs and not step.chain


def in_running_order(backward: list[Edge]) -> list[Step]:
    """The steps of a backward cover in running order: the chain, and each hanging node as soon as it can run."""
    recomputed = frozenset(r for e in backward for r in e.recomputes)
    order: list[Step] = []
    waiting: list[Step] = []
    made: set[Ref] = set()
    for edge in reversed(backward):
        for step in edge.steps:
            step = _use_recomputed(step, recomputed)
            if step.chain:
                order.append(step)
                made.update([r for _, r in step.outputs])
            else:
                waiting.append(step)
        # A step waits for what is computed again.
        while ready := [s for s in waiting if all(r in made for _, r in s.inputs if r.kind is RECOMPUTED)]:
            waiting = [s for s in waiting if s not in ready]
            order += ready
            made.update([r for s in ready for r in s.writes()])
    assert not waiting, [s.name for s in waiting]
    return order


def _use_recomputed(step: Step, recomputed: frozenset[Ref]) -> Step:
    """A hanging node reads what was computed again, where something was."""
    if not is_hanging(step):
        return step
    again = recomputed.intersection([r for _, r in step.inputs])
    if not again:
        return step
    inputs = tuple([(n, r._replace(kind=RECOMPUTED) if r in again else r) for n, r in step.inputs])
    return replace(step, inputs=inputs)


def without_idle(backward: list[Step]) -> list[Step]:
    """The steps without those that gather for hanging nodes what none of them reads."""
    found: list[Step] = []
    read: set[Ref] = set()
    for step in reversed(backward):
        if step.chain or any(r in read or r.kind not in (RECOMPUTED, STARTED) for r in step.writes()):
            found.append(step)
            read.update(step.reads())
    return found[::-1]

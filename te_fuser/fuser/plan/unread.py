"""What backward's kernels compute again and nobody reads: a fusion has saved what its ops would read.

Candidates for row ops do not know whose backward a cover takes behind them, and price what ops would read, kept or
computed again. Once the cover is known, stores without a reader go.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import RECOMPUTED, Ref
from te_fuser.fuser.plan.candidates import kernel_step

if TYPE_CHECKING:
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step


def without_unread(problem: Problem, prices: Prices, backward: list[Step]) -> list[Step]:
    """The steps whose kernels compute nothing again that no step reads."""
    again = {r for step in backward for _, r in step.outputs if r.kind is RECOMPUTED}
    idle = again - {r for step in backward for _, r in step.inputs} if again else again
    if not idle:
        return backward
    found: list[Step] = []
    for step in backward:
        kernel = step.task.kernel
        if kernel is None or idle.isdisjoint(step.writes()):
            found.append(step)
        elif (less := _without(kernel, idle)) is not None:
            made = kernel_step(problem, prices, less, step.start, step.stop)
            found.append(replace(made, chain=step.chain))
    return found


def _without(task: KernelTask, idle: Set[Ref]) -> KernelTask | None:
    """The same kernel without some of what it stores; None where that was all."""
    d = task.description
    aliases = tuple([pair for pair in task.aliases if pair[0] not in idle])
    needed = {old for _, old in aliases}
    stays = [o.ref not in idle or o.ref in needed for o in task.outputs]
    stores = [s for s, stay in zip(d.stores, stays, strict=False) if stay]
    if not (stores or d.sums or d.maxima or aliases):
        return None
    return task.storing(stores, [o for o, stay in zip(task.outputs, stays, strict=True) if stay], aliases)

"""Sums over ranks of parameters' gradients, of which each rank has a term: a step that starts them, one that waits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.refs import LEFT
from te_fuser.fuser.steps.step import Task
from te_fuser.params.gradient_sums import start_sums, wait_for_sums

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.steps.step import Bench, Runner, Slots, Step


@dataclass(frozen=True)
class SumTask(Task):
    """One of the two steps.

    Attributes:
        group: the ranks.
        parameters: whose gradients, as the graph counts them; those that a call leaves to the engine stay terms.
        phase: "start" or "wait".
    """

    what = "torch"
    compares = False

    group: Group
    parameters: tuple[int, ...]
    phase: str
    ops: tuple[int, ...] = ()

    @property
    def waits(self) -> bool:  # type: ignore[override]
        return self.phase == "wait"

    def runner(self, step: Step, bench: Bench) -> Runner:
        inputs, outputs = dict(step.inputs), dict(step.outputs)
        terms = [(p, bench.slots[inputs[f"term {p}"]]) for p in self.parameters]
        under_way = bench.slots[inputs["started"] if self.waits else outputs["started"]]
        left, group = bench.slots[LEFT], self.group

        def start(slots: Slots) -> None:
            slots[under_way] = start_sums([slots[k] for p, k in terms if p not in slots[left]], group)

        if not self.waits:
            return start
        made = [bench.slots[outputs[f"sum {p}"]] for p in self.parameters]

        def wait(slots: Slots) -> None:
            own = [slots[k] for p, k in terms if p not in slots[left]]
            sums = iter(wait_for_sums(slots[under_way], own, group))
            for (p, term), k in zip(terms, made, strict=True):
                slots[k] = slots[term] if p in slots[left] else next(sums)

        return wait

"""Promises of a step besides its numbers: it leaves what it reads as it is, and makes what the plan says, in memory.

Each promise is checked where it is made: at each step, on the very tensors that it reads and makes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from te_fuser.compare import same_bits
from te_fuser.fuser.graph.refs import PARAMETER
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run.loading import execute, load
from te_fuser.fuser.run.program import misshapen
from te_fuser.fuser.steps.step import Runner, SlotMap, Slots, Step


class Promises:
    """The promises of one step of a plan."""

    def __init__(self, plan: Plan, step: Step, slots: SlotMap) -> None:
        self._graph, self._task = plan.graph, step.task
        self._inputs = tuple((name, slots[ref]) for name, ref in step.inputs)
        self._outputs = tuple((ref, slots[ref]) for ref in step.writes())
        covered = [plan.graph.nodes[k] for k in range(step.start, step.stop)]
        self._written = {name for node in covered for name in node.op.writes}
        bound = [(name, ref.index) for name, ref in step.inputs if ref.kind is PARAMETER]
        self._written |= {name for name, index in bound if plan.graph.parameters[index].written}
        direction = "forward" if any(step is s for s in plan.forward) else "backward"
        self.label = f"{direction} step {step.name!r} over {', '.join(node.label for node in covered)}"

    def before(self, slots: Slots) -> dict[str, torch.Tensor]:
        """Copies of the step's inputs, to be compared with the inputs when it has run."""
        looked_at = [(name, slots[k]) for name, k in self._inputs if name not in self._written]
        return {name: t.clone() for name, t in looked_at if isinstance(t, torch.Tensor)}

    def broken(self, slots: Slots, before: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Promises that the step did not keep, in words."""
        for name, k in self._inputs:
            if name in before and not same_bits(before[name], slots[k]):
                yield f"it changed its input {name!r}"
        for ref, k in self._outputs:
            if isinstance(slots[k], torch.Tensor) and (what := misshapen(self._graph, ref, slots[k])) is not None:
                yield what
        yield from self._shared(slots)

    def _shared(self, slots: Slots) -> Iterator[str]:
        """Outputs that lie in another tensor's memory, where the step says that it makes its own."""
        if not self._task.own_memory or self._task.aliases:
            return
        taken = {memory_of(slots[k]): f"its input {name!r}" for name, k in self._inputs}
        for ref, k in self._outputs:
            memory, what = memory_of(slots[k]), ref.label(self._graph)
            if memory is not None and memory in taken:
                yield f"{what} lies in the memory of {taken[memory]}, and its body says that it is plain"
            taken[memory] = what


def memory_of(t: Any) -> int | None:
    """Address at which a tensor's memory begins; None for anything without memory."""
    return t.untyped_storage().data_ptr() or None if isinstance(t, torch.Tensor) else None


def run_watched(
    fuser: Fuser, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...], said: list[str]
) -> Any:
    """Run the plan for x as `fuser.run` does; promises that are broken, here or in backward, go to `said`."""
    known, call = fuser.prepare(x, inputs, outputs)
    plan = fuser.sized(known.plan, call)

    def wrap(step: Step, runner: Runner, slots: SlotMap) -> Runner:
        promises = Promises(plan, step, slots)

        def run(slots: Slots) -> None:
            before = promises.before(slots)
            runner(slots)
            said.extend(f"{promises.label}: {what}" for what in promises.broken(slots, before))

        return run

    return execute(load(known.plan, outputs, wrap=wrap), x, inputs, call.parameters)

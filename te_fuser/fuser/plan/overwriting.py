"""Marks of the inputs that a plan's generated kernels may store outputs over: those that die at that step.

Such an input has LEAST_BYTES and the shape of the output, is no result, not kept, and read by no later step under any
name. It is memory of our own: a generated kernel, a fusion's body that says so or a sum of gradients made it. Other
code may hold a view, or read on another stream. The kernel must allow it (`codegen.in_place`), and so must the call,
where nobody else may hold it (`csrc/sole_owner.h`): docs/lab/overwriting.md.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from te_fuser.codegen.description import item_size
from te_fuser.fuser.graph.refs import PARAMETER_GRADIENT, Ref, bytes_of, gradient_ref

if TYPE_CHECKING:
    from te_fuser.fuser.plan.plan import Plan, SegmentPlan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.steps.step import Step

LEAST_BYTES = 2**20


def mark_overwrites(plan: Plan, prices: Prices) -> Plan:
    """The plan with generated CUDA kernels that may overwrite what dies at their step."""
    values = plan.graph.values
    if plan.target != "cuda" or all(max(bytes_of(v.spec), bytes_of(v.gradient_spec)) < LEAST_BYTES for v in values):
        return plan
    ours = _kept_of_our_own(plan)

    def change(segment: SegmentPlan, direction: str) -> Iterator[Step]:
        steps = segment.steps(direction)
        if direction == "forward":
            lives = _Lives.of(steps, {*(k.ref for k in segment.kept), *segment.gives})
        else:
            returned = {r for s in steps for r in s.writes() if r.kind is PARAMETER_GRADIENT and not r.term}
            lives = _Lives.of(steps, returned | {gradient_ref(v) for v in segment.values_in}, ours)
        return (_overwriting(plan, s, k, lives) for k, s in enumerate(steps))

    return plan.changed(change)


def _kept_of_our_own(plan: Plan) -> set[Ref]:
    """Tensors that forward makes, one segment alone keeps, and nobody else ever sees."""
    graph = plan.graph
    seen = Counter(k.ref for segment in plan.segments for k in segment.kept)
    given = {graph.ref(v.index) for v in graph.values if v.index in graph.results}
    everywhere = _Lives.of(plan.steps, given)
    made = {r for s in plan.forward for r in s.writes()}
    return {
        r for r, times in seen.items()
        if times == 1 and r in made and r not in given and everywhere.is_ours(r) and len(everywhere.names(r)) == 1
    }  # fmt: skip


def _overwriting(plan: Plan, step: Step, number: int, lives: _Lives) -> Step:
    """The step, number so and so of its program, with what its kernel may overwrite."""

    def dying(ref: Ref, lead: Ref, dtype: str) -> bool:
        if not lives.dies(ref, number):
            return False
        shape, whole = shape_of(plan, ref), shape_of(plan, lead) or ()
        return shape is not None and shape[:-1] == whole[:-1] and math.prod(shape) * item_size(dtype) >= LEAST_BYTES

    task = step.task.storing_over(dying, plan.device.arch)
    return step if task is step.task else replace(step, task=task)


def shape_of(plan: Plan, ref: Ref) -> tuple[int, ...] | None:
    """The sizes of a value, or of its gradient; None for anything else."""
    spec = ref.spec(plan.graph) if ref.is_of_a_value else None
    return None if spec is None else spec.shape


@dataclass(frozen=True)
class _Lives:
    """Lifetimes and owners of the tensors of one program.

    Attributes:
        last: the last step that reads or makes a ref.
        same: refs that a step gives another name to -> all names of that tensor.
        foreign: refs that other code than kernels and products makes or reads.
        own: refs whose memory is our own, as far as their maker is concerned.
        held: what the program gives.
    """

    last: dict[Ref, int]
    same: dict[Ref, frozenset[Ref]]
    foreign: frozenset[Ref]
    own: frozenset[Ref]
    held: frozenset[Ref]

    @classmethod
    def of(cls, steps: Sequence[Step], held: Iterable[Ref], given: Iterable[Ref] = ()) -> _Lives:
        """The lives in these steps; `held` outlive them, `given` is our memory from before."""
        last: dict[Ref, int] = {}
        same: dict[Ref, frozenset[Ref]] = {}
        foreign: set[Ref] = set()
        own = set(given)
        for k, step in enumerate(steps):
            touched = [*step.reads(), *step.writes()]
            last |= dict.fromkeys(touched, k)
            if not step.task.own_memory:
                foreign.update(touched)
                continue
            aliases = step.task.aliases
            own.update(set(step.writes()) - {new for new, _ in aliases})
            for new, old in aliases:
                names = same.get(new, frozenset([new])) | same.get(old, frozenset([old]))
                same |= dict.fromkeys(names, names)
        return cls(last, same, frozenset(foreign), frozenset(own), frozenset(held))

    def names(self, ref: Ref) -> frozenset[Ref]:
        return self.same.get(ref, frozenset([ref]))

    def is_ours(self, ref: Ref) -> bool:
        """True where our own steps made the tensor, and only they read it."""
        names = self.names(ref)
        return bool(names & self.own) and not names & self.foreign

    def dies(self, ref: Ref, number: int) -> bool:
        """True for the last step that needs a tensor of our own, under any name."""
        others = self.names(ref) - {ref}
        return (
            self.is_ours(ref)
            and not self.names(ref) & self.held
            and self.last[ref] == number
            and all(self.last[r] < number for r in others)
        )

"""Steps that no cover has: other forms of what is there, and sums of gradients to which several steps contribute."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.gradients import marked_refs
from te_fuser.fuser.graph.refs import (
    AS_MADE,
    LEFT,
    PARAMETER,
    PARAMETER_GRADIENT,
    STARTED,
    Ref,
    own_term_ref,
    parameter_gradient_ref,
    parameter_ref,
)
from te_fuser.fuser.plan.transposing import turning_step
from te_fuser.fuser.steps.step import Price
from te_fuser.fuser.steps.sum_task import SumTask
from te_fuser.fuser.steps.torch_tasks import AddTask, CastTask

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.step import Step


def with_forms(problem: Problem, prices: Prices, steps: list[Step], made: set[Ref]) -> list[Step]:
    """Before the first step that reads a form that no step makes, the step that does; `made` are there before.

    Parameters in another dtype, and what is read transposed of which other code than a generated kernel makes the rows.
    """
    made = made | {r for s in steps for _, r in s.outputs if r.form.layout != "rows"}
    result: list[Step] = []
    for step in steps:
        for _, ref in step.inputs:
            if ref.form == AS_MADE or ref in made:
                continue
            covers = step.start, step.stop
            if ref.form.layout != "rows":
                result.append(turning_step(problem, prices, ref, covers))
            elif ref.kind is PARAMETER:
                assert ref.form.dtype is not None
                inputs, outputs = (("parameter", parameter_ref(ref.index)),), (("cast", ref),)
                task, price = CastTask(ref.form.dtype), Price("of_launch", (inputs, outputs, 0.0))
                result.append(prices.step("cast_parameter", covers, inputs, outputs, task, price))
            made.add(ref)
        result.append(step)
    return result


def with_sums(problem: Problem, prices: Prices, steps: list[Step], arriving: list[Ref]) -> list[Step]:
    """Where several steps contribute to one gradient, rename the contributions and add them up.

    Args:
        arriving: first terms that come from outside.
    """
    counts: dict[Ref, int] = {r._replace(term=0): r.term for r in arriving}
    for step in steps:
        for _, ref in step.outputs:
            counts[ref] = counts.get(ref, 0) + 1
    shared = {r for r, n in counts.items() if n > 1}
    if not shared:
        return steps
    seen: dict[Ref, list[Ref]] = {r: [] for r in shared} | {r._replace(term=0): [r] for r in arriving}
    result: list[Step] = []
    for step in steps:
        renames: dict[Ref, Ref] = {}
        for ref in step.writes():
            if ref in seen:
                renames[ref] = ref._replace(term=len(seen[ref]) + 1)
                seen[ref].append(renames[ref])
        result.append(_renamed(step, renames))
        complete = [r for r in step.writes() if r in shared and len(seen[r]) == counts[r]]
        for ref in dict.fromkeys(complete):
            inputs = tuple((f"term {k}", r) for k, r in enumerate(seen[ref]))
            price = Price("of_sum", (ref, len(inputs) - 1))
            absent = ref.kind is PARAMETER_GRADIENT and parameter_ref(ref.index) in marked_refs(problem.nodes)
            covers, outputs = (step.start, step.stop), (("sum", ref),)
            result.append(prices.step("add_gradients", covers, inputs, outputs, AddTask(absent), price))
    return result


def with_sums_over_ranks(problem: Problem, prices: Prices, steps: list[Step]) -> list[Step]:
    """Where ranks have terms of parameters' gradients, two steps more for each group, that add them up."""
    sums = problem.graph.sums
    if not sums:
        return steps
    made = [r for s in steps for r in s.writes() if r.kind is PARAMETER_GRADIENT and not r.term and r.index in sums]
    if not made:
        return steps
    renames = {r: own_term_ref(r.index) for r in made}
    result = [_renamed(s, {r: renames[r] for r in s.writes() if r in renames}) for s in steps]
    for group in dict.fromkeys(sums[r.index] for r in made):
        result += _over_ranks(problem, prices, group, [r.index for r in made if sums[r.index] == group])
    return result


def _over_ranks(problem: Problem, prices: Prices, group: Group, parameters: list[int]) -> Iterable[Step]:
    ops = tuple([n.index for n in problem.nodes if not set(parameters).isdisjoint(n.parameters.values())])
    covers = ops[0], ops[-1] + 1
    terms = [(f"term {p}", own_term_ref(p)) for p in parameters]
    whole = [(f"sum {p}", parameter_gradient_ref(p)) for p in parameters]
    way = [("started", Ref(STARTED, ops[0], name=f"sums over {group.title} ({group.name})"))]
    for phase, inputs, outputs in (("start", terms, way), ("wait", [*way, *terms], whole)):
        task = SumTask(group, tuple(parameters), phase, ops)
        price = Price("of_sums_over_ranks", ([r for _, r in terms] if phase == "start" else [], group.size))
        yield prices.step(f"sum_gradients.{phase}", covers, [*inputs, ("left", LEFT)], outputs, task, price)


def _renamed(step: Step, renames: dict[Ref, Ref]) -> Step:
    """The step with other names for what it makes."""
    if not renames:
        return step
    outputs = tuple([(name, renames.get(ref, ref)) for name, ref in step.outputs])
    return replace(step, outputs=outputs, task=step.task.renamed(renames))

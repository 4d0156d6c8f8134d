"""Steps of covers made whole: in running order, with casts and sums of gradients, without stores that nobody reads.

Candidates of row ops price every possible read; unread stores go once the cover is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.fuser.graph.graph import marked_refs
from te_fuser.fuser.graph.refs import (
    AS_MADE,
    LEFT,
    PARAMETER,
    PARAMETER_GRADIENT,
    RECOMPUTED,
    STARTED,
    Ref,
    own_term_ref,
    parameter_gradient_ref,
    parameter_ref,
)
from te_fuser.fuser.plan.layouts import turning_step
from te_fuser.fuser.plan.plan import SavedTensor
from te_fuser.fuser.steps.function_tasks import SumTask, add_task, cast_task
from te_fuser.fuser.steps.step import Price

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.plan.candidates import Edge
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step


def in_running_order(backward: list[Edge]) -> list[Step]:
    """The chain of a backward cover, and each hanging node as soon as it can run."""
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
    if not step.hangs:
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


def kept_by(prices: Prices, backward: list[Step]) -> tuple[SavedTensor, ...]:
    """Tensors that backward steps read and none of them makes."""
    graph = prices.graph
    found: dict[Ref, SavedTensor] = {}
    made = {r for s in backward for _, r in s.outputs}
    for step in backward:
        for name, ref in step.inputs:
            if ref.kind.owner and ref not in found and ref not in made:
                text = f"{step.name}: {name}" if ref.name else ref.label(graph)
                found[ref] = SavedTensor(ref, text, prices.size(ref), graph.owner(ref))
    return tuple(found.values())


def without_unread(prices: Prices, backward: list[Step]) -> list[Step]:
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
            found.append(replace(prices.kernel_step(less, step.start, step.stop), chain=step.chain))
    return found


def _without(task: KernelTask, idle: Set[Ref]) -> KernelTask | None:
    """Kernel without its stores of the refs in `idle`; None where nothing is left for it to do."""
    d = task.description
    aliases = tuple([pair for pair in task.aliases if pair[0] not in idle])
    needed = {old for _, old in aliases}
    stays = [o.ref not in idle or o.ref in needed for o in task.outputs]
    stores = [s for s, stay in zip(d.stores, stays, strict=False) if stay]
    if not (stores or d.sums or d.maxima or aliases):
        return None
    return task.storing(stores, [o for o, stay in zip(task.outputs, stays, strict=True) if stay], aliases)


def with_forms(prices: Prices, steps: list[Step], made: set[Ref]) -> list[Step]:
    """Put before the first step that reads a form which no step makes the step that does; `made` are there before.

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
                result.append(turning_step(prices, ref, covers))
            elif ref.kind is PARAMETER:
                assert ref.form.dtype is not None
                inputs, outputs = (("parameter", parameter_ref(ref.index)),), (("cast", ref),)
                task, price = cast_task(ref.form.dtype), Price("of_launch", (inputs, outputs, 0.0))
                result.append(prices.step("cast_parameter", covers, inputs, outputs, task, price))
            made.add(ref)
        result.append(step)
    return result


def with_sums(prices: Prices, steps: list[Step], arriving: list[Ref]) -> list[Step]:
    """Rename the contributions of several steps to one gradient, and add the steps that sum them."""
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
            absent = ref.kind is PARAMETER_GRADIENT and parameter_ref(ref.index) in marked_refs(prices.problem.nodes)
            covers, outputs = (step.start, step.stop), (("sum", ref),)
            result.append(prices.step("add_gradients", covers, inputs, outputs, add_task(len(inputs), absent), price))
    return result


def with_sums_over_ranks(prices: Prices, steps: list[Step]) -> list[Step]:
    """Add a step that starts and one that waits, for each group that sums gradients."""
    sums = prices.graph.sums
    if not sums:
        return steps
    made = [r for s in steps for r in s.writes() if r.kind is PARAMETER_GRADIENT and not r.term and r.index in sums]
    if not made:
        return steps
    renames = {r: own_term_ref(r.index) for r in made}
    result = [_renamed(s, {r: renames[r] for r in s.writes() if r in renames}) for s in steps]
    for group in dict.fromkeys(sums[r.index] for r in made):
        result += _over_ranks(prices, group, [r.index for r in made if sums[r.index] == group])
    return result


def _over_ranks(prices: Prices, group: Group, parameters: list[int]) -> Iterable[Step]:
    ops = tuple([n.index for n in prices.problem.nodes if not set(parameters).isdisjoint(n.parameters.values())])
    covers = ops[0], ops[-1] + 1
    terms = [(f"term {p}", own_term_ref(p)) for p in parameters]
    whole = [(f"sum {p}", parameter_gradient_ref(p)) for p in parameters]
    way = [("started", Ref(STARTED, ops[0], name=f"sums over {group.title} ({group.name})"))]
    for phase, inputs, outputs in (("start", terms, way), ("wait", [*way, *terms], whole)):
        task = SumTask(group, tuple(parameters), phase, ops)
        price = Price("of_sums_over_ranks", ([r for _, r in terms] if phase == "start" else [], group.size))
        yield prices.step(f"sum_gradients.{phase}", covers, [*inputs, ("left", LEFT)], outputs, task, price)


def _renamed(step: Step, renames: dict[Ref, Ref]) -> Step:
    if not renames:
        return step
    outputs = tuple([(name, renames.get(ref, ref)) for name, ref in step.outputs])
    return replace(step, outputs=outputs, task=step.task.renamed(renames))

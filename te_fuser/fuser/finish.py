"""From covers to a plan: segments, casts of parameters, sums of gradients, what is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import replace

from te_fuser.fuser.candidates import Edge
from te_fuser.fuser.covers import Covers, in_running_order
from te_fuser.fuser.plan import AddTask, CastTask, Kept, Plan, Step
from te_fuser.fuser.prices import Prices
from te_fuser.fuser.problem import Problem
from te_fuser.fuser.refs import AS_MADE, PARAMETER, VALUE, Ref, bytes_of, parameter_ref
from te_fuser.fuser.stretch import KernelPlan
from te_fuser.fusions.match import Cost

SEGMENT_BYTES = 25 * 2**20  # of parameter gradients
_SHORT_END = 1 / 16  # of that: too little for a segment of its own


def finish(problem: Problem, prices: Prices, covers: Covers) -> Plan:
    """The plan of these covers."""
    parts = segments(problem, covers)
    # Each segment makes its own casts and sums: what comes from several of them autograd adds up.
    forward_steps = [s for e in covers.forward for s in e.steps]
    forward = _by_segment(lambda steps: _with_casts(problem, prices, steps), forward_steps, parts)
    backward_steps = in_running_order(covers.backward)
    backward = _by_segment(lambda steps: _with_sums(problem, prices, steps), backward_steps, parts[::-1])
    taken = {(s.name, s.start, s.stop) for s in (*forward, *backward)}
    refused = (r for r in covers.refusals if (r.name, r.start, r.stop) not in taken)
    memory = problem.options.memory
    return Plan(
        problem.graph,
        tuple(forward),
        tuple(backward),
        kept(problem, prices, backward),
        parts,
        problem.options.device,
        problem.options.kernels,
        memory if isinstance(memory, str) else f"at most {memory} bytes",
        (*problem.conditions, *refused),
        tuple(c for e in covers.backward for c in e.choices),
    )


def _by_segment(
    change: Callable[[list[Step]], list[Step]], steps: list[Step], parts: Iterable[tuple[int, int]]
) -> list[Step]:
    return [s for start, stop in parts for s in change([s for s in steps if start <= s.start < stop])]


# ------------------------------------------------------------------------------------------------------ casts


def _with_casts(problem: Problem, prices: Prices, steps: list[Step]) -> list[Step]:
    """Before the first step that reads a parameter in another dtype, the step that makes it."""
    made: set[Ref] = set()
    result: list[Step] = []
    for step in steps:
        for ref in step.reads():
            if ref.kind is PARAMETER and ref.form != AS_MADE and ref not in made:
                made.add(ref)
                result.append(_cast(problem, prices, ref, step))
        result.append(step)
    return result


def _cast(problem: Problem, prices: Prices, ref: Ref, step: Step) -> Step:
    dtype = ref.form.dtype
    assert dtype is not None
    inputs, outputs = (("parameter", parameter_ref(ref.index)),), (("cast", ref),)
    c = prices.of_launch(inputs, outputs, 0.0)
    seconds = prices.seconds(c, problem.nodes[step.start])
    return Step("cast_parameter", step.start, step.stop, inputs, outputs, CastTask(dtype), c, seconds)


# ---------------------------------------------------------------------------------------------- summed gradients


def _with_sums(problem: Problem, prices: Prices, steps: list[Step]) -> list[Step]:
    """Where several steps contribute to one gradient, rename the contributions and add them up."""
    counts: dict[Ref, int] = {}
    for step in steps:
        for ref in step.writes():
            counts[ref] = counts.get(ref, 0) + 1
    shared = {r for r, n in counts.items() if n > 1}
    if not shared:
        return steps
    seen: dict[Ref, list[Ref]] = {r: [] for r in shared}
    result: list[Step] = []
    for step in steps:
        result.append(_rename_outputs(step, seen))
        complete = [r for r in dict.fromkeys(step.writes()) if r in shared and len(seen[r]) == counts[r]]
        result += [_sum(problem, prices, ref, seen[ref], step) for ref in complete]
    return result


def _sum(problem: Problem, prices: Prices, ref: Ref, terms: list[Ref], step: Step) -> Step:
    inputs = tuple((f"term {k}", r) for k, r in enumerate(terms))
    size, sums = prices.size(ref), len(terms) - 1
    c = Cost(2 * size * sums, size * sums, 0.0, sums)
    seconds = prices.seconds(c, problem.nodes[step.start])
    return Step("add_gradients", step.start, step.stop, inputs, (("sum", ref),), AddTask(), c, seconds)


def _rename_outputs(step: Step, seen: dict[Ref, list[Ref]]) -> Step:
    """The step with every shared gradient that it makes under a name of its own, which is added to `seen`."""
    renames: dict[Ref, Ref] = {}
    outputs = []
    for name, ref in step.outputs:
        if ref in seen:
            renames[ref] = ref._replace(term=len(seen[ref]) + 1)
            seen[ref].append(renames[ref])
        outputs.append((name, renames.get(ref, ref)))
    if not renames:
        return step
    task = step.task
    if isinstance(task, KernelPlan):
        outs = tuple(replace(o, ref=renames.get(o.ref, o.ref)) for o in task.outputs)
        aliases = tuple((renames.get(a, a), renames.get(b, b)) for a, b in task.aliases)
        task = replace(task, outputs=outs, aliases=aliases)
    return replace(step, outputs=tuple(outputs), task=task)


# ----------------------------------------------------------------------------------------------- what is kept


def kept(problem: Problem, prices: Prices, backward: list[Step]) -> tuple[Kept, ...]:
    """Everything that backward steps read and none of them makes; of views of one memory only the first has bytes."""
    found: dict[Ref, Kept] = {}
    made: set[Ref] = set()
    counted: set[Ref] = set()
    for step in backward:
        for name, ref in step.inputs:
            if ref in found or ref in made or not ref.owner:
                continue
            entry = _kept(problem, prices, name, ref, step)
            if ref.kind is VALUE:
                storage = problem.graph.stored(ref)
                entry = replace(entry, bytes=0) if storage in counted else entry
                counted.add(storage)
            found[ref] = entry
        made |= set(step.writes())
    return tuple(found.values())


def _kept(problem: Problem, prices: Prices, name: str, ref: Ref, step: Step) -> Kept:
    graph = problem.graph
    text = f"{step.name}: {name}" if ref.name else ref.label(graph)
    return Kept(ref, text, prices.size(ref), graph.owner(ref))


# --------------------------------------------------------------------------------------------------- segments


def segments(problem: Problem, covers: Covers) -> tuple[tuple[int, int], ...]:
    """Cut beside a product, where both covers end a step, when a segment's parameter gradients pass SEGMENT_BYTES.

    An end of the list with next to none, as the bias behind the last product, is part of the segment before it.
    """
    graph = problem.graph
    ends = {e.stop for e in covers.forward} & {e.stop for e in covers.backward} - _bound(problem, covers.backward)
    cuts, size, counted = [0], 0, set()
    for node, following in itertools.zip_longest(problem.nodes, problem.nodes[1:]):
        for p in node.parameters.values():
            if graph.parameter_needs[p] and p not in counted:
                counted.add(p)
                size += bytes_of(graph.parameter_specs[p])
        if following is None:
            break
        beside = any(not n.is_row and n.parameters for n in (node, following))
        if size >= SEGMENT_BYTES and following.index in ends and beside:
            cuts.append(following.index)
            size = 0
    if size < _SHORT_END * SEGMENT_BYTES and len(cuts) > 1:
        cuts.pop()
    return tuple(itertools.pairwise([*cuts, len(problem.nodes)]))


def _bound(problem: Problem, backward: list[Edge]) -> set[int]:
    """Where no cut can be: between what computes or saves a value for backward and what reads it."""
    graph = problem.graph
    found: set[int] = set()
    for edge in backward:
        if edge.whole is not None:
            found |= set(range(edge.whole[0] + 1, edge.whole[1]))
        for ref in edge.recomputes:
            standing_for = [v.index for v in graph.values if graph.ref(v.index) == ref and graph.consumers(v.index)]
            found |= set(range(edge.stop, max(graph.consumers(v)[-1] for v in standing_for) + 1))
    return found


__all__ = ["SEGMENT_BYTES", "finish", "kept", "segments"]

"""Layouts other than rows, of 8 bits: transposed, and by blocks.

The kernel that makes the rows stores both where it can, else a step turns them. Covers know nothing of blocks: a pass
over the plan takes them from a kernel by tiles, or a fusion, for the one product that reads them (`Body.by_blocks`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from te_fuser.codegen.cuda_formulas import rewrite
from te_fuser.codegen.description import NotOneKernel, Store
from te_fuser.codegen.schedule import limits_of
from te_fuser.codegen.schedule_model import tile_refusal
from te_fuser.dtypes import name_of
from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.refs import AS_MADE, RECOMPUTED, Form, Ref, gradient_ref
from te_fuser.fuser.plan.prices import NOTHING
from te_fuser.fuser.steps.function_tasks import transpose_task
from te_fuser.fuser.steps.kernel_task import KernelOutput
from te_fuser.fuser.steps.step import Price, Step
from te_fuser.fusions import registry

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.codegen.schedule import Limits
    from te_fuser.fuser.plan.covers import Covers
    from te_fuser.fuser.plan.kernel_cache import DerivedStretch
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Options, Problem
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.op_tasks import FusionTask
    from te_fuser.fuser.steps.step import Task
    from te_fuser.fusions.match import ByBlocks

Place = tuple[int, int]  # the ops that a step covers


def row_steps(
    prices: Prices, covers: Place, wanted: Sequence[Ref], derive: Callable[[bool], KernelTask | None]
) -> tuple[Step, ...]:
    """The kernel of a range, and where it cannot store what is wanted transposed, steps that turn its rows.

    Args:
        derive: f(transposed) -> the kernel that gives what is wanted, so or by rows; None where there is nothing to do.
    """
    kernel = derive(bool(wanted))
    turning: Sequence[Ref] = ()
    if kernel is not None and why_not_transposed(prices.problem.options, kernel.description):
        kernel, turning = derive(False), wanted
    steps = () if kernel is None else (prices.kernel_step(kernel, *covers),)
    return *steps, *[turning_step(prices, ref, covers) for ref in turning]


def why_not_transposed(options: Options, description: KernelDescription) -> str:
    """Reason for which a kernel cannot store its transposed outputs; empty where it can, or has none."""
    if options.target != "cuda" or not description.transposed:
        return ""
    if description.reductions:
        return "rows that wait for their sums and what is turned are in each other's way: two launches are faster"
    return tile_refusal(rewrite(description), limits_of(options.device.arch))


def turning_step(prices: Prices, ref: Ref, covers: Place) -> Step:
    """The step that makes a tensor transposed from its rows."""
    inputs, outputs = (("rows", ref.by_rows),), (("transposed", ref),)
    spec = ref.spec(prices.graph)
    assert spec is not None
    task = transpose_task(spec.dtype, prices.problem.options.target == "cuda")
    return prices.step("transposed8", covers, inputs, outputs, task, Price("of_launch", (inputs, outputs, 0.0)))


def wanted_of(problem: Problem, start: int, stop: int, again: Iterable[Ref]) -> list[Ref]:
    """Transposed outputs wanted of a backward kernel: gradients, and values computed again."""
    if not problem.transposed:
        return []
    nodes = problem.nodes[start:stop]
    made = {v for n in nodes for v in (n.output, *n.named_out)}
    entering = dict.fromkeys(v for n in nodes for v in (n.input, *n.named_in.values()) if v not in made)
    gradients = [r for v in entering if (r := gradient_ref(v).transposed) in problem.transposed]
    return gradients + [r._replace(kind=RECOMPUTED) for r in again if r.form.layout == "transposed"]


def given_transposed(problem: Problem, task: FusionTask, outputs: Iterable[tuple[str, Ref]]) -> list[tuple[str, Ref]]:
    """Transposed outputs that are read of a backward that is one step, and that its body gives."""
    names = () if task.body is None else task.body.transposed
    return [(f"{name}.transposed", r.transposed) for name, r in outputs if name in names and _is_read(problem, r)]


def with_turned(prices: Prices, steps: Sequence[Step], covers: Place) -> tuple[Step, ...]:
    """A fusion's steps, with those that turn what it gives by rows alone and is read transposed."""
    made = [r for s in steps for r in s.writes()] if prices.problem.transposed else []
    missing = [r.transposed for r in made if _is_read(prices.problem, r) and r.transposed not in made]
    return *steps, *[turning_step(prices, r, covers) for r in missing]


def _is_read(problem: Problem, ref: Ref) -> bool:
    return ref.form.layout == "rows" and ref.transposed in problem.transposed


def in_forward(prices: Prices, stretch: DerivedStretch, covers: Place, kept: Iterable[Ref]) -> tuple[float, float]:
    """Seconds, and the host's, that forward takes more to make what is kept transposed, too."""
    turned = [r for r in kept if r.form.layout == "transposed"]
    if not turned:
        return NOTHING
    values = list(map(prices.graph.value_of, turned))
    try:
        kernel = stretch.forward(*covers, values, (), values)
    except NotOneKernel:
        return NOTHING  # who makes them, forward's cover says
    if kernel is not None and not why_not_transposed(prices.problem.options, kernel.description):
        return sum(map(prices.size, turned)) / prices.problem.options.device.bandwidth, 0.0
    steps = [turning_step(prices, r, covers) for r in turned]
    return math.fsum([s.seconds for s in steps]), math.fsum([s.host for s in steps])


class _Handover(NamedTuple):
    """A step that makes a tensor, the step that reads it by blocks, and the tensor."""

    maker: int
    reader: int
    ref: Ref


def store_by_blocks(plan: Plan, prices: Prices) -> Plan:
    """The plan whose kernels make by blocks what products read so."""
    if not _is_on(prices.problem.options):
        return plan
    limits, segments = _limits(prices.problem.options), []
    for s in plan.segments:
        held = {*s.gives, *s.takes, *[k.ref for k in s.kept], *s.returned, *s.arriving}
        forward, backward = [*s.forward], [*s.backward]
        for steps in (forward, backward):
            for maker, reader, ref in _pairs(steps, limits):
                blocks, task = steps[reader].task.takes_blocks, _making(steps[maker], steps[reader], ref, limits)
                if ref not in held and task is not None and blocks is not None:
                    steps[maker] = _made_by(task, steps[maker], ref, blocks, prices)
                    steps[reader] = _reading(steps[reader], ref, prices)
        segments.append(replace(s, forward=tuple(forward), backward=tuple(backward)))
    return replace(plan, segments=tuple(segments))


def held_together(prices: Prices, covers: Covers) -> Iterator[int]:
    """Ops before which no segment may begin: between a kernel and a product that it makes blocks for."""
    if not _is_on(prices.problem.options):
        return
    for placed in (covers.forward, covers.backward):
        if not any(s.task.takes_blocks for p in placed for e in p.edges for s in e.steps):
            continue
        steps = [s for p in placed for e in p.moved(prices) for s in e.steps]
        for maker, reader, _ in _pairs(steps, _limits(prices.problem.options)):
            parts = steps[maker], steps[reader]
            yield from range(min(s.stop for s in parts), max(s.start for s in parts) + 1)


def _is_on(options: Options) -> bool:
    return options.target == "cuda" and registry.enabled(registry.BY_BLOCKS)


def _limits(options: Options) -> Limits:
    return limits_of(options.device.arch)


def _pairs(steps: Sequence[Step], limits: Limits) -> list[_Handover]:
    """Handovers in these steps, each of a tensor that one reader alone reads."""
    readers = [(k, blocks) for k, step in enumerate(steps) if (blocks := step.task.takes_blocks) is not None]
    if not readers:
        return []
    makers = {r: k for k, step in enumerate(steps) for r in step.writes()}
    reads = Counter(r for step in steps for r in step.reads())
    found = []
    for k, blocks in readers:
        ref = dict(steps[k].inputs)[blocks.name]
        maker, plain = makers.get(ref), reads[ref] == 1 and ref.form == AS_MADE and not ref.term
        if maker is not None and plain and _making(steps[maker], steps[k], ref, limits) is not None:
            found.append(_Handover(maker, k, ref))
    return found


def _making(step: Step, reader: Step, ref: Ref, limits: Limits) -> Task | None:
    """Task that makes a tensor by blocks in the place of its rows; None where there is none."""
    kernel, blocks = step.task.kernel, reader.task.takes_blocks
    if blocks is None:
        return None
    if kernel is not None:
        return _kernel_making(kernel, ref, blocks, limits)
    return step.task.giving_blocks([name for name, r in step.outputs if r == ref], blocks)


def _kernel_making(task: KernelTask, ref: Ref, blocks: ByBlocks, limits: Limits) -> KernelTask | None:
    d = task.description
    aliases = tuple([pair for pair in task.aliases if pair[0] != ref])
    at = next((k for k, o in enumerate(task.outputs[: len(d.stores)]) if o.ref == ref), None)
    store = d.stores[at] if at is not None else _store_of_alias(task, ref)
    if store is None or store.axes != Axes.FULL or ref in {old for _, old in aliases}:
        return None
    dtype, place = name_of(blocks.dtype), slice(0, 0) if at is None else slice(at, at + 1)
    stores, outputs = list(d.stores), list(task.outputs)
    stores[place] = [
        Store(f"{store.name}_{layout}", store.parts, Axes.FULL, store.width, dtype, layout, store.dtype)
        for layout in blocks.layouts
    ]
    outputs[place] = [KernelOutput(r, Axes.FULL, store.width, dtype) for r in _forms(ref, blocks)]
    made = task.storing(stores, outputs, aliases)
    return None if tile_refusal(rewrite(made.description), limits) else made


def _store_of_alias(task: KernelTask, ref: Ref) -> Store | None:
    """The store of a tensor that is another name of one that the kernel reads."""
    source = dict(task.aliases).get(ref)
    for given, load in zip(task.inputs, task.description.loads, strict=True):
        if given == source and load.axes == Axes.FULL and load.width == task.description.width:
            read = tuple([n for n in task.description.nodes if n.op == "input" and n.attrs[0] == load.name])
            return Store(load.name, read, load.axes, load.width, load.dtype)
    return None


def _made_by(task: Task, step: Step, ref: Ref, blocks: ByBlocks, prices: Prices) -> Step:
    """The step that makes a tensor by blocks."""
    if task.kernel is not None:
        return replace(prices.kernel_step(task.kernel, step.start, step.stop), chain=step.chain)
    outputs: list[tuple[str, Ref]] = []
    for name, made in step.outputs:
        forms = [(f"{name}.{r.form.layout}", r) for r in _forms(ref, blocks)]
        outputs += forms if made == ref else [(name, made)]
    return replace(step, task=task, outputs=tuple(outputs))


def _forms(ref: Ref, blocks: ByBlocks) -> list[Ref]:
    return [ref._replace(form=Form(blocks.dtype, layout)) for layout in blocks.layouts]


def _reading(step: Step, ref: Ref, prices: Prices) -> Step:
    blocks = step.task.takes_blocks
    assert blocks is not None and step.price is not None
    forms = list(zip(blocks.names, _forms(ref, blocks), strict=True))
    inputs = [found for name, r in step.inputs for found in (forms if r == ref else [(name, r)])]
    _, match, *_ = step.price.arguments
    price = Price("of_fusion_by_blocks", (blocks, match))
    return prices.step(
        step.name, (step.start, step.stop), inputs, step.outputs, step.task.taking_blocks(), price, chain=step.chain
    )

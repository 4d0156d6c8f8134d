"""Tensors that a call makes of its parameters and for its amaxes, before its segments and before kernels that scale."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.refs import PARAMETER, Ref, parameter_ref
from te_fuser.fuser.steps.function_tasks import MakeTask, scale_task, zeros_task
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions.registry import Maker, Wanted, maker_for
from te_fuser.kernels.quantizers import in_kernels
from te_fuser.ops.row_op import RowOp

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch

    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step
    from te_fuser.recipe.recipes import OwnScales


def prepare_parameters(plan: Plan, prices: Prices) -> Plan:
    """The plan with what its fusions read of parameters that are made."""
    forward, backward = (
        {r for s in steps if s.task.what == "fusion" for r in s.reads() if r.kind is PARAMETER}
        for steps in (plan.forward, plan.backward)
    )
    found: dict[Maker, list[tuple[Node, Wanted]]] = {}
    made: set[Ref] = set()
    for node in plan.graph.nodes if forward or backward else ():
        maker = maker_for(node.op)
        if maker is None:
            continue
        refs = {name: parameter_ref(node.parameters[name]) for name in maker.makes}
        wanted = [n for n, r in refs.items() if r in backward or r in forward and n in maker.in_forward]
        wanted = [n for n in wanted if refs[n] not in made]
        if wanted:
            made |= {refs[name] for name in wanted}
            numbers, graph = node.parameters, plan.graph
            given = {name: graph.parameter_specs[numbers[name]] for name in maker.of if name in numbers}
            again = frozenset([name for name in wanted if graph.parameters[numbers[name]].in_parts])
            found.setdefault(maker, []).append((node, Wanted(node.op, given, tuple(wanted), again)))
    if not made:
        return plan
    steps = []
    for maker, items in found.items():
        inputs = [(f"{n.index}.{name}", parameter_ref(n.parameters[name])) for n, w in items for name in w.given]
        outputs = [(f"{n.index}.{name}", parameter_ref(n.parameters[name])) for n, w in items for name in w.makes]
        makes, ops = tuple([w for _, w in items]), tuple([n.index for n, _ in items])
        task, price = (
            MakeTask(maker, makes, plan.x.device, ops),
            Price(lambda _, maker, wanted: maker.cost(wanted), (maker, makes)),
        )
        steps.append(prices.step(maker.name, (ops[0], ops[-1] + 1), inputs, outputs, task, price))
    segments = []
    for segment in plan.segments:  # each says of what it keeps whose it is
        kept = [k._replace(owner="tensor") if k.ref in made else k for k in segment.kept]
        segments.append(replace(segment, kept=tuple(kept)))
    return replace(plan, before=tuple(steps), segments=tuple(segments))


def measuring_steps(
    prices: Prices, covers: tuple[int, int], derive: Callable[[], KernelTask | None]
) -> tuple[Step, ...]:
    """Pass that measures for the kernel of a range, and steps that make scales."""
    found = [(node, own) for node in prices.problem.nodes[slice(*covers)] if (own := _own_scale(node)) is not None]
    kernel = derive() if found else None
    if kernel is None:
        return ()
    in_kernel = _is_made_in_kernels(prices.problem.options.target)
    own_of = {parameter_ref(node.parameters[_AMAX]): own for node, own in found}
    if in_kernel:
        d = kernel.description
        maxima = [replace(m, scale=in_kernels(*own_of[ref])) for m, ref in zip(d.maxima, kernel.raised, strict=True)]
        kernel = replace(kernel, description=replace(d, maxima=tuple(maxima)))
    made = [prices.kernel_step(kernel, *covers)]
    for node, own in found:
        if parameter_ref(node.parameters[_AMAX]) not in kernel.raised:
            continue
        refs = {name: parameter_ref(node.parameters[name]) for name in (_AMAX, *_MADE)}
        inputs = (("amax", refs[_AMAX]),)
        outputs = tuple([(name, refs[name]) for name in _MADE])
        task = scale_task(*own, in_kernel)
        price = Price("of_nothing", ()) if in_kernel else Price("of_launch", (inputs, outputs, 0.0))
        made.append(prices.step("scale_of_amax", covers, inputs, outputs, task, price))
    return tuple(made)


def _is_made_in_kernels(target: str) -> bool:
    """True where the pass that measures makes the scale, too."""
    return target == "cuda"


def why_unmeasured(nodes: Iterable[Node], forward: bool) -> str | None:
    """Reason, if any, for which a fusion cannot stand for ops: their scales must be measured first."""
    for op, label in [(node.op, node.label) for node in nodes if _own_scale(node) is not None]:
        assert isinstance(op, RowOp)
        if op.measured_in_forward if forward else op.measured_in_backward:
            return f"the scale of {label} follows from what it quantizes, which has to be there first"
    return None


def _own_scale(node: Node) -> tuple[torch.dtype, OwnScales] | None:
    return node.op.own_scale() if isinstance(node.op, RowOp) else None


_AMAX, _MADE = "own_amax", ("scale", "inverse")


def name_of_rows(steps: Sequence[Step]) -> str:
    """Name of row kernels: that of the last, for which the others run; "none" without any."""
    kernels = [s.name for s in steps if s.task.kernel is not None]
    return kernels[-1] if kernels else "none"


def zero_amaxes(plan: Plan, prices: Prices) -> Plan:
    """The plan with what its passes begin with: zeros for all of a call by one step."""
    graph = plan.graph
    numbers = [k for k, b in enumerate(graph.parameters) if b.made_in_call and b.written]
    read = {r for s in plan.steps for r in s.reads() if r.kind is PARAMETER} if numbers else ()
    numbers = [k for k in numbers if parameter_ref(k) in read]
    if not numbers:
        return plan
    nodes = tuple([n.index for n in graph.nodes if not set(n.parameters.values()).isdisjoint(numbers)])
    outputs = tuple([(graph.parameters[k].name, parameter_ref(k)) for k in numbers])
    in_kernels = _is_made_in_kernels(plan.target)
    task, price = zeros_task(plan.x.device, nodes, len(outputs), in_kernels), Price("of_launch", ((), outputs, 0.0))
    step = prices.step("zeros", (nodes[0], nodes[-1] + 1), (), outputs, task, price)
    return replace(plan, before=(*plan.before, step))


# ---------------------------------------------------------------------------------- passes that nobody needs


def raise_amaxes(plan: Plan, prices: Prices) -> Plan:
    """The plan whose kernels raise amaxes that a pass of its own would look for."""
    if not _is_made_in_kernels(plan.target) or not any(b.made_in_call for b in plan.graph.parameters):
        return plan
    return plan.changed(lambda segment, direction: _raised_in(segment.steps(direction), prices))


def _raised_in(steps: tuple[Step, ...], prices: Prices) -> tuple[Step, ...]:
    made, makers = [*steps], {r: k for k, s in enumerate(steps) for r in s.writes()}
    left = set()
    for k, step in enumerate(steps):
        ref = _looked_at(step)
        at = None if ref is None else makers.get(ref)
        task = None if ref is None or at is None else _raising(made[at].task.kernel, ref, step.task.kernel)
        if at is None or task is None:
            continue
        maker = prices.kernel_step(task, made[at].start, made[at].stop)
        made[at] = replace(maker, chain=made[at].chain)
        left.add(k)
    return tuple([s for k, s in enumerate(made) if k not in left])


def _looked_at(step: Step) -> Ref | None:
    """The tensor of a pass that looks for the largest magnitude of a tensor as it is."""
    kernel = step.task.kernel
    if kernel is None or kernel.description.outputs or len(kernel.description.maxima) != 1:
        return None
    d, (maximum,) = kernel.description, kernel.description.maxima
    (part, *more) = maximum.parts
    alone = len(d.loads) == 1 and not more and part.op == "input" and part.width == d.loads[0].width == maximum.width
    return kernel.inputs[0] if alone and maximum.scale is not None else None


def _raising(task: KernelTask | None, ref: Ref, alone: KernelTask | None) -> KernelTask | None:
    """The kernel that stores a tensor and raises what the pass alone does; None where it cannot."""
    if task is None or alone is None:
        return None
    d, (maximum,), (load,) = task.description, alone.description.maxima, alone.description.loads
    store = next((s for s, o in zip(d.stores, task.outputs, strict=False) if o.ref == ref), None)
    known = {t.name for t in (*d.tensors, *d.maxima)}
    if store is None or (store.axes, store.layout, store.dtype) != (Axes.FULL, "rows", load.dtype):
        return None
    if maximum.name in known:
        return None
    made_in = "" if store.dtype == "float32" else store.dtype
    raised = replace(maximum, parts=store.parts, width=store.width, made_in=made_in)
    description = replace(d, maxima=(*d.maxima, raised))
    return replace(task, description=description, raised=(*task.raised, *alone.raised))

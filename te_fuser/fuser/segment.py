"""A segment of a plan: one autograd node. The only `torch.autograd.Function` of the code base is here."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_fuser import _native
from te_fuser.fuser.plan import Plan, Step
from te_fuser.fuser.program import KernelFunction, Program, SlotMap, Wrapper, build_program
from te_fuser.fuser.refs import (
    AS_MADE,
    NOTES,
    PARAMETER,
    PARAMETER_GRADIENT,
    SEED,
    Ref,
    gradient_ref,
    parameter_gradient_ref,
    parameter_ref,
)
from te_fuser.fuser.stretch import KernelPlan

Picker = Callable[[list[Any]], tuple[Any, ...]]
Build = Callable[..., tuple[Program, SlotMap]]  # (steps, inputs, outputs)


@dataclass(frozen=True)
class Segment:
    """A part of a plan made ready to run.

    Attributes:
        values_in, values_out: values of the graph that enter and leave, in the order of tensors and results.
        parameters: the graph's parameters that it reads, in the order after the values.
        uses_seed: whether the last tensor handed in is the seed.
        forward, backward: the programs; backward is None where nobody needs a gradient.
        kept: forward slots that are saved; in backward they come after the gradients.
        marked: (place among the kept, place among the tensors handed in) of parameters whose attributes backward reads.
        notes: (forward slot, backward slot) of what opaque ops hand over beside tensors.
        gradients_in: the slots of the results' gradients; None for a result that takes none.
        gradients_out: the slots of the gradients of what comes in; an empty one for what needs none.
        results_at: the slots of the outputs; `aliased` ones share an input's or an earlier output's storage.
        overwrites: whether backward may store over what was kept or made, which then must be the node's alone.
        take_kept, take_gradients: `kept` and `gradients_out` out of the slots, as tuples.
    """

    values_in: tuple[int, ...]
    values_out: tuple[int, ...]
    parameters: tuple[int, ...]
    uses_seed: bool
    forward: Program
    backward: Program | None
    kept: tuple[int, ...]
    marked: tuple[tuple[int, int], ...]
    notes: tuple[tuple[int, int], ...]
    gradients_in: tuple[int | None, ...]
    gradients_out: tuple[int, ...]
    results_at: tuple[int, ...]
    aliased: tuple[bool, ...]
    device: str
    overwrites: bool
    take_kept: Picker
    take_gradients: Picker

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """All slots after the forward program."""
        slots = self.forward.slots(tensors)
        self.forward.run(slots)
        return slots

    def results(self, slots: list[Any]) -> list[torch.Tensor]:
        """The outputs; ones that share storage become tensors of their own over it."""
        if self.aliased == (False,):
            return [slots[self.results_at[0]]]
        return [
            slots[k].detach() if shared else slots[k] for k, shared in zip(self.results_at, self.aliased, strict=True)
        ]


class SegmentFunction(torch.autograd.Function):
    """Runs one segment's forward program, and its backward program when gradients arrive."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        slots = segment.run_forward(tensors)
        ctx.segment = segment
        ctx.set_materialize_grads(False)
        if segment.notes:
            ctx.notes = [slots[k] for k, _ in segment.notes]
        if segment.marked:
            ctx.marked = [tensors[k] for _, k in segment.marked]
        if segment.overwrites:  # hooks may keep memory that no count of references shows
            ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        outs = segment.results(slots)
        if len(outs) > 1:
            ctx.meta = [(t.shape, t.dtype, t.device) for t in outs]
            ctx.mark_non_differentiable(*[t for t, k in zip(outs, segment.gradients_in, strict=True) if k is None])
        ctx.save_for_backward(*segment.take_kept(slots))
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "te_fuser does not differentiate its backward: call backward() without create_graph=True, "
                "or use model.reference(x), which plain autograd differentiates any number of times"
            )
        segment: Segment = ctx.segment
        program = segment.backward
        assert program is not None
        if grads[0] is None and all(g is None for g in grads):
            return (None,) * (1 + len(segment.gradients_out))
        saved = ctx.saved_tensors
        if segment.marked:
            saved = _with_marked(saved, segment, ctx.marked)
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if not stays:
            ctx.maybe_clear_saved_tensors()
        may_overwrite = segment.overwrites and not stays and not ctx.hooked
        # From here on the slots alone hold the tensors, so that each is freed after its last use.
        slots = program.slots((*_arrived(ctx, segment, grads), *saved))
        del saved, grads
        for k, (_, slot) in enumerate(segment.notes):
            slots[slot] = ctx.notes[k]
        kind = segment.device
        if torch.is_autocast_enabled(kind):  # backward() inside of it: the plan has the casts already
            with torch.autocast(kind, enabled=False):
                program.run(slots, may_overwrite)
        else:
            program.run(slots, may_overwrite)
        return (None, *segment.take_gradients(slots))


def _with_marked(
    saved: tuple[torch.Tensor, ...], segment: Segment, parameters: Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    """What was saved, but the parameters themselves: hooks, as checkpointing's, give tensors without attributes."""
    found = list(saved)
    for (place, _), parameter in zip(segment.marked, parameters, strict=True):
        found[place] = parameter
    return found


def _arrived(ctx: Any, segment: Segment, grads: tuple[torch.Tensor | None, ...]) -> Sequence[torch.Tensor]:
    """The gradients of the results that take one; zeros for those that nobody used."""
    if len(grads) == 1:
        return grads  # type: ignore[return-value]
    needed = [(k, g) for k, (g, slot) in enumerate(zip(grads, segment.gradients_in, strict=True)) if slot is not None]
    return [g if g is not None else _zeros(ctx.meta[k]) for k, g in needed]


def _zeros(meta: tuple[torch.Size, torch.dtype, torch.device]) -> torch.Tensor:
    return torch.zeros(meta[0], dtype=meta[1], device=meta[2])


def build_segments(
    plan: Plan,
    kernels: Mapping[str, KernelFunction],
    wrap: Wrapper | None = None,
    sums: _native.ColumnSums | None = None,
) -> tuple[Segment, ...]:
    """Every segment of a plan, ready to run.

    Args:
        wrap: what runs in each step's place.
        sums: adds up column sums at the end of a program; without it each kernel adds up its own.
    """
    build = functools.partial(build_program, kernels=kernels, wrap=wrap, sums=sums)
    return tuple(_build(plan, start, stop, build) for start, stop in plan.segments)


class _Refs:
    """What the two programs of a segment take and give, as refs."""

    def __init__(self, plan: Plan, start: int, stop: int) -> None:
        graph = self.graph = plan.graph
        self.forward_steps = [s for s in plan.forward if start <= s.start < stop]
        self.backward_steps = [s for s in plan.backward if start <= s.start < stop]
        self.values_in, self.values_out = crossing(plan, start, stop)
        reads = _reads(self.forward_steps, self.backward_steps)
        # What vanished from a formula is read by no step, and has a gradient of zeros all the same.
        self._made = {r for s in self.backward_steps for r in s.writes()}
        self.parameters = sorted(
            {r.index for r in reads if r.kind is PARAMETER and r.form == AS_MADE}
            | {r.index for r in self._made if r.kind is PARAMETER_GRADIENT}
        )
        self.uses_seed = SEED in reads
        self.kept = kept_refs(self.backward_steps)
        self.notes: list[Ref] = [
            Ref(NOTES, n) for n in sorted({r.task.node.index for r in self.forward_steps if hasattr(r.task, "node")})
        ]
        self.inputs = [graph.ref(v) for v in self.values_in] + [parameter_ref(p) for p in self.parameters]
        self.inputs += [SEED] if self.uses_seed else []
        self.outputs = [graph.ref(v) for v in self.values_out]

    def marked(self) -> tuple[tuple[int, int], ...]:
        """Where the kept parameters stand whose attributes say where their gradients go: among the kept, the inputs."""
        nodes = self.graph.nodes
        refs = {parameter_ref(n.parameters[a]) for n in nodes for a in n.op.marked_parameters(tuple(n.parameters))}
        return tuple((k, self.inputs.index(r)) for k, r in enumerate(self.kept) if r in refs)

    def arriving(self) -> list[Ref | None]:
        """The gradient of each output; None for one that takes none."""
        return [gradient_ref(v) if self.graph.needs_grad(v) else None for v in self.values_out]

    def returned(self) -> list[Ref | None]:
        """The gradient of each input; None for one that needs none, or that nothing reaches."""
        graph, there = self.graph, self._made.union(r for r in self.arriving() if r is not None)
        found = [gradient_ref(v) if graph.needs_grad(v) else None for v in self.values_in]
        found += [parameter_gradient_ref(p) if graph.parameter_needs[p] else None for p in self.parameters]
        found += [None] if self.uses_seed else []
        return [r if r in there else None for r in found]


@dataclass(frozen=True)
class _Backward:
    """The part of a segment that only one with a backward program has; its fields are those of the segment."""

    backward: Program | None = None
    kept: tuple[int, ...] = ()
    marked: tuple[tuple[int, int], ...] = ()
    notes: tuple[tuple[int, int], ...] = ()
    gradients_in: tuple[int | None, ...] = ()
    gradients_out: tuple[int, ...] = ()


def _build_backward(refs: _Refs, forward_slots: SlotMap, build: Build) -> _Backward:
    if not refs.backward_steps:
        return _Backward()
    arriving, returned = refs.arriving(), refs.returned()
    given = [*(r for r in arriving if r is not None), *refs.kept]
    backward, slots = build(refs.backward_steps, given, [r for r in returned if r is not None])
    return _Backward(
        backward,
        tuple(forward_slots[r] for r in refs.kept),
        refs.marked(),
        tuple((forward_slots[r], slots[r]) for r in refs.notes if r in slots),
        tuple(None if r is None else slots[r] for r in arriving),
        tuple(backward.size if r is None else slots[r] for r in returned),
    )


def _build(plan: Plan, start: int, stop: int, build: Build) -> Segment:
    refs = _Refs(plan, start, stop)
    forward, slots = build(refs.forward_steps, refs.inputs, [*refs.outputs, *refs.kept, *refs.notes])
    back = _build_backward(refs, slots, build)
    return Segment(
        tuple(refs.values_in),
        tuple(refs.values_out),
        tuple(refs.parameters),
        refs.uses_seed,
        forward,
        back.backward,
        back.kept,
        back.marked,
        back.notes,
        back.gradients_in,
        back.gradients_out,
        tuple(slots[r] for r in refs.outputs),
        _aliased(refs.inputs, refs.outputs, refs.forward_steps),
        plan.graph.values[0].spec.device.type,
        any(isinstance(s.task, KernelPlan) and s.task.description.overwrites for s in refs.backward_steps),
        _picker(back.kept),
        _picker(back.gradients_out),
    )


def _picker(places: tuple[int, ...]) -> Picker:
    """A function that takes these places out of a list."""
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple(items[k] for k in places)


def crossing(plan: Plan, start: int, stop: int) -> tuple[list[int], list[int]]:
    """The values that enter the segment start..stop-1 and those that leave it."""
    graph = plan.graph
    values_in: dict[int, None] = {}
    values_out: dict[int, None] = {}
    for node in graph.nodes[start:stop]:
        for value in (node.input, *node.named_in.values()):
            producer = graph.producer(value)
            if producer is None or producer < start:
                values_in[value] = None
        for value in (node.output, *node.named_out):
            if graph.leaves(value) or any(c >= stop for c in graph.consumers(value)):
                values_out[value] = None
    return list(values_in), list(values_out)


def _reads(*groups: list[Step]) -> set[Ref]:
    return {r for steps in groups for s in steps for r in s.reads()}


def kept_refs(backward_steps: list[Step]) -> list[Ref]:
    """What the backward steps of a segment read and none of them makes, gradients apart."""
    made: set[Ref] = set()
    kept: dict[Ref, None] = {}
    for step in backward_steps:
        for ref in step.reads():
            if ref not in made and ref.owner:
                kept[ref] = None
        made |= set(step.writes())
    return list(kept)


def _aliased(inputs: list[Ref], outputs: list[Ref], steps: list[Step]) -> tuple[bool, ...]:
    same: dict[Ref, Ref] = {}
    for step in steps:
        for new, old in getattr(step.task, "aliases", ()):
            same[new] = same.get(old, old)
    seen = set(inputs)
    flags = []
    for ref in outputs:
        real = same.get(ref, ref)
        flags.append(real in seen)
        seen.add(real)
    return tuple(flags)

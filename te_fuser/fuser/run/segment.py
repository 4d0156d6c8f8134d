"""A segment of a plan: one autograd node. The only `torch.autograd.Function` of plans is here."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

import torch

from te_fuser import _native
from te_fuser.distributed.consistency import one_thread
from te_fuser.distributed.dtensor import as_gradient, own_part
from te_fuser.fuser.graph.graph import marked_refs, stops_gradients
from te_fuser.fuser.graph.refs import LEFT, PARAMETER, SEED, Ref, parameter_ref
from te_fuser.fuser.run import delayed
from te_fuser.fuser.run.program import Loaded, Program, build_program, refuse_check, run_program
from te_fuser.kernels import quantizers
from te_fuser.params.concatenated_parameter import kept_in_parts, whole_again
from te_fuser.params.gradient_sums import is_left
from te_fuser.params.main_grad import is_absent
from te_fuser.sharding.rules import joint_ops

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Plan, SegmentPlan
    from te_fuser.fuser.steps.step import SlotMap, Step

Picker = Callable[[list[Any]], tuple[Any, ...]]
Gradient = Optional[torch.Tensor]  # noqa: UP045 - a type alias at run time


@dataclass(frozen=True)
class Ranks:
    """Part that ranks share in a segment.

    Attributes:
        groups: of ranks that run some of the plan's ops together.
        sums: groups, and the parameters of whose gradient each rank has a term: their places among the tensors handed
            in, and their numbers in the graph.
        distributed: the places among the tensors handed in of parameters that are DTensors.
        parts: (place among the kept, number among these) of those of which backward reads this rank's part.
    """

    groups: tuple[Group, ...] = ()
    sums: tuple[tuple[Group, tuple[tuple[int, int], ...]], ...] = ()
    distributed: tuple[int, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Backward:
    """Backward of a segment made ready to run, and what its forward keeps for it.

    Attributes:
        program: all but what is left for `late`.
        take_kept: what is saved out of the forward slots; in backward it comes after the gradients.
        marked: (place among the kept, place among the tensors handed in) of parameters whose attributes backward reads.
        written: the same of parameters that steps write into: others may have done so before backward, so they are not
            saved, but held.
        joined: the places among the kept of parameters that may be kept as the parts that they are made of.
        notes: (forward slot, backward slot) of what opaque ops hand over beside tensors.
        gradients_in: the slots of the results' gradients; None for a result that takes none.
        gradients_out: the slots that `take_gradients` takes out; an empty one for what needs none.
        overwrites: whether it may store over what was kept or made, which then must be the node's alone.
        zeroed: slots of numbers that are zero before a run and after it, which its steps raise in between.
        left_at: the slot of those that a call leaves to the engine.
    """

    program: Program
    take_kept: Picker
    marked: tuple[tuple[int, int], ...]
    written: tuple[tuple[int, int], ...]
    joined: tuple[int, ...]
    notes: tuple[tuple[int, int], ...]
    gradients_in: tuple[int | None, ...]
    gradients_out: tuple[int, ...]
    take_gradients: Picker
    overwrites: bool
    zeroed: tuple[int, ...]
    left_at: int
    late: Late | None

    def left(self, ranks: Ranks, tensors: Sequence[torch.Tensor]) -> frozenset[int]:
        """The parameters, as the graph counts them, whose gradients ranks would add up, and leave to the engine.

        One whose gradient goes to main_grad is refused: terms of earlier calls are there.
        """
        found = frozenset(p for _, places in ranks.sums for k, p in places if is_left(tensors[k]))
        marked = {k for _, k in self.marked}
        for group, places in ranks.sums:
            if not marked.isdisjoint([k for k, p in places if p not in found]):
                raise RuntimeError(
                    f"a weight that each rank of {group.title} has whole is read beside rows that they cut, and its "
                    "gradient goes to main_grad: call te_fuser.parallel.leave_sums_to_engine(model), and add up "
                    "main_grad over the ranks before a step"
                )
        return found

    def given(self, ranks: Ranks, slots: list[Any], lying: Sequence[Any], take: Picker) -> Sequence[Gradient]:
        """The gradients of what was handed in; none of those that went elsewhere."""
        given = take(slots)
        if self.marked:
            given = tuple([None if g is not None and is_absent(g) else g for g in given])
        if not ranks.distributed:
            return given
        found = list(given)
        for place, (spec, shape) in zip(ranks.distributed, lying, strict=True):
            if (gradient := found[place]) is not None:
                found[place] = as_gradient(gradient, spec, shape)
        if torch.is_anomaly_enabled():
            refuse_check(found)
        return found


@dataclass(frozen=True)
class Segment:
    """A part of a plan made ready to run.

    Attributes:
        uses_seed: whether the last tensor handed in, behind the values and parameters of `plan`, is the seed.
        results_at: the slots of the outputs; `aliased` ones share an input's or an earlier output's storage.
        unrecorded: whether autograd is not to see the operations of its forward program, since an op stops gradients.
        last_read: of the values that enter those that no later segment reads and the call does not give.
        backward: None where nobody needs a gradient, or PyTorch's functions give it.
        promised: in a plan's first call, the graph with its sizes: what steps make is held against it.
    """

    plan: SegmentPlan
    uses_seed: bool
    forward: Program
    results_at: tuple[int, ...]
    aliased: tuple[bool, ...]
    device: str
    unrecorded: bool
    last_read: tuple[int, ...]
    ranks: Ranks
    backward: Backward | None
    promised: Graph | None = None

    def run_forward(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        slots = self.forward.slots(self._own(tensors) if self.ranks.distributed else tensors)
        self.run(self.forward, slots, promised=self.promised)
        return slots

    def run(self, program: Program, slots: list[Any], *given: Any, **how: Any) -> None:
        """Run a program of its own, as `run_program` does; alone among those of its ranks' groups."""
        if not self.ranks.groups:
            run_program(program, slots, *given, **how)
            return
        with one_thread(self.ranks.groups):
            run_program(program, slots, *given, **how)

    def _own(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        found = list(tensors)
        for place in self.ranks.distributed:
            found[place] = own_part(found[place])
        return found

    def results(self, slots: list[Any], given: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """The outputs; ones that are an input or an earlier one become views of it, which autograd knows as such.

        Where no autograd node sees that an op's own code gave one of the values handed in back, these are `given`.
        """
        made: list[torch.Tensor] = []
        for place, shared in zip(self.results_at, self.aliased):  # noqa: B905 - small calls feel each word here
            t = slots[place]
            for other in (*given, *made):
                shared = shared or t is other
            made.append(t.view_as(t) if shared else t)
        return [_native.refusing(t) for t in made] if self.plan.recorded else made


@dataclass(frozen=True)
class Late:
    """Part of a segment's backward that is left for later.

    Attributes:
        program: its steps.
        reads: the slots, after the backward program, that these steps read; the first slots of their own.
        weights: the places, among the tensors handed in, of the weights whose gradients they make.
        take_gradients: takes the gradients of all tensors that are handed in out of the slots.
    """

    program: Program
    reads: tuple[int, ...]
    weights: tuple[int, ...]
    take_gradients: Picker

    def gradients(
        self, segment: Segment, back: Backward, slots: list[Any], lying: Sequence[Any]
    ) -> Callable[[], Sequence[Gradient]]:
        """Function that makes the gradients, once."""
        slots = self.program.slots([slots[k] for k in self.reads])
        read = [t for t in slots if isinstance(t, torch.Tensor) and not (t.is_leaf and t.requires_grad)]
        seen = [(t, t._version) for t in read if not t.is_inference()]

        def made() -> Sequence[Gradient]:
            for t, version in seen:
                if t._version != version:
                    raise RuntimeError(
                        f"backward_dw: a tensor {list(t.shape)} that gradients of weights need was written in place "
                        "since the backward that left them: call backward_dw() before, or give the model a copy"
                    )
            seen.clear()
            _run_backward(segment, back, self.program, slots, False)
            return back.given(segment.ranks, slots, lying, self.take_gradients)

        return made


class SegmentFunction(torch.autograd.Function):
    """Runs one segment's forward program, and its backward program when gradients arrive."""

    @staticmethod
    def forward(ctx: Any, segment: Segment, *tensors: torch.Tensor) -> Any:  # type: ignore[override]
        back, ranks = segment.backward, segment.ranks
        assert back is not None
        if back.late is not None:
            tensors, ctx.waited_for = delayed.themselves(tensors, back.late.weights)
        slots = segment.run_forward(tensors)
        ctx.segment = segment
        ctx.set_materialize_grads(False)
        if ranks.sums:
            ctx.left = back.left(ranks, tensors)
        if back.notes:
            ctx.notes = [slots[k] for k, _ in back.notes]
        if back.marked:
            ctx.marked = [tensors[k] for _, k in back.marked]
        if back.overwrites:  # hooks may keep memory that no count of references shows
            ctx.hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        kept: Sequence[Any] = back.take_kept(slots)
        outs = _unlinked(segment.results(slots), (*kept, *tensors))
        if len(outs) > 1:
            ctx.meta = [(t.shape, t.dtype, t.device) for t in outs]
            ctx.mark_non_differentiable(*[t for t, k in zip(outs, back.gradients_in, strict=True) if k is None])
        if back.written:
            ctx.written = [tensors[k] for _, k in back.written]
            kept = _exchanged(kept, back.written, [None] * len(kept))
        if back.joined:
            kept, ctx.places = kept_in_parts(kept, back.joined)
        if ranks.distributed:  # saved as they are: who takes them away meanwhile fills the same ones again
            whole = [tensors[place] for place in ranks.distributed]
            ctx.lying = [(t._spec, t._local_tensor.shape) for t in whole]  # type: ignore[attr-defined]
            kept = _exchanged(kept, ranks.parts, [whole[number] for _, number in ranks.parts])
        ctx.save_for_backward(*kept)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:  # type: ignore[override]
        _native.refuse_create_graph()
        segment: Segment = ctx.segment
        back, ranks = segment.backward, segment.ranks
        assert back is not None
        if grads[0] is None and all(g is None for g in grads):
            return (None,) * (1 + len(back.gradients_out))
        saved: Sequence[Any] = ctx.saved_tensors
        if back.joined:
            saved = whole_again(saved, ctx.places)
        if back.marked:  # hooks, as checkpointing's, give tensors without attributes
            saved = _exchanged(saved, back.marked, ctx.marked)
        if back.written:
            saved = _exchanged(saved, back.written, ctx.written)
        if ranks.parts:
            saved = _exchanged(saved, ranks.parts, [own_part(saved[place]) for place, _ in ranks.parts])
        stays = torch._C._autograd._get_current_graph_task_keep_graph()
        if not stays:
            ctx.maybe_clear_saved_tensors()
        may_overwrite = back.overwrites and not stays and not ctx.hooked
        # From here on the slots alone hold the tensors, so that each is freed after its last use.
        slots = back.program.slots((*_arriving(ctx, back, grads), *saved))
        del saved, grads
        for k, (_, slot) in enumerate(back.notes):
            slots[slot] = ctx.notes[k]
        if ranks.sums:
            slots[back.left_at] = ctx.left
        _run_backward(segment, back, back.program, slots, may_overwrite)
        lying = ctx.lying if ranks.distributed else ()
        given = back.given(ranks, slots, lying, back.take_gradients)
        if back.late is not None:
            made, places = back.late.gradients(segment, back, slots, lying), back.late.weights
            if not ctx.waited_for:
                given = [g if late is None else late for g, late in zip(given, made(), strict=True)]
            elif torch._C._will_engine_execute_node(ctx.next_functions[places[0]][0]):
                delayed.Waiting(ctx.waited_for, lambda: [*map(made().__getitem__, places)])
        return (None, *given)


def _run_backward(segment: Segment, back: Backward, program: Program, slots: list[Any], may_overwrite: bool) -> None:
    kind = segment.device
    try:
        if torch.is_autocast_enabled(kind):  # backward() inside of it: the plan has the casts already
            with torch.autocast(kind, enabled=False):
                segment.run(program, slots, may_overwrite, True, segment.promised)
        else:
            segment.run(program, slots, may_overwrite, True, segment.promised)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # of a device that takes nothing any more
            for k in back.zeroed:  # which a graph that is kept reads again
                if slots[k] is not None:
                    quantizers.lower_again(slots[k].data)  # saved scales lie beside them, of one version
        raise


def _unlinked(outs: list[torch.Tensor], held: Sequence[Any]) -> list[torch.Tensor]:
    """The outputs, none a view of otherwise unseen memory, which autograd lets nobody write."""
    if not any(t._is_view() for t in outs):
        return outs
    bases = [t if t._base is None else t._base for t in (*outs, *held) if isinstance(t, torch.Tensor)]
    alone = [sum(t._base is base for base in bases) == 1 for t in outs]
    return [t.data if only else t for t, only in zip(outs, alone, strict=True)]


def _exchanged(
    saved: Sequence[Any], places: Sequence[tuple[int, int]], parameters: Sequence[torch.Tensor | None]
) -> Sequence[Any]:
    """Saved values, with other tensors in some places."""
    found = list(saved)
    for (place, _), parameter in zip(places, parameters, strict=False):
        found[place] = parameter
    return found


def _arriving(ctx: Any, back: Backward, grads: tuple[torch.Tensor | None, ...]) -> Sequence[torch.Tensor]:
    """The gradients of the results that take one; zeros for those that nobody used."""
    if len(grads) == 1:
        return [grads[0].resolve_neg()] if grads[0].is_neg() else grads  # type: ignore[union-attr, return-value]
    found = []
    for g, slot, (shape, dtype, device) in zip(grads, back.gradients_in, ctx.meta, strict=True):
        if slot is not None:
            found.append(torch.zeros(shape, dtype=dtype, device=device) if g is None else g.resolve_neg())
    return found


class _ParameterRefs(NamedTuple):
    """Parameters that steps write into, that are kept in parts, that begin as zero."""

    written: Container[Ref]
    joined: Container[Ref]
    zeroed: Container[Ref]


def build_segments(plan: Plan, loaded: Loaded) -> tuple[Segment, ...]:
    graph, bindings = plan.graph, {parameter_ref(k): b for k, b in enumerate(plan.graph.parameters)}
    parameters = _ParameterRefs(
        {r for r, b in bindings.items() if b.written},
        {r for r, b in bindings.items() if b.in_parts},
        {r for r, b in bindings.items() if b.written and b.made_in_call},
    )
    stops = any(map(stops_gradients, graph.nodes))
    groups = tuple(dict.fromkeys([one.group for one in joint_ops([n.op for n in graph.nodes])]))
    inner = {v.index for v in graph.values if graph.makers[v.index] is not None and v.index not in graph.results}
    last = {v: k for k, segment in enumerate(plan.segments) for v in segment.values_in if v in inner}
    there = [tuple(v for v in s.values_in if last.get(v) == k) for k, s in enumerate(plan.segments)]
    return tuple(
        _build(s, plan, loaded, parameters, stops, groups, ends) for s, ends in zip(plan.segments, there, strict=True)
    )


def _among_ranks(segment: SegmentPlan, graph: Graph, groups: tuple[Group, ...]) -> Ranks:
    """Groups, DTensors and terms of gradients that ranks share in a segment."""
    lies = {parameter_ref(k) for k, it in enumerate(graph.lies) if it is not None}
    refs = [ref for ref in segment.takes if ref in lies]
    kept = [entry.ref for entry in segment.kept] if segment.backward and not segment.recorded else []
    sums: dict[Group, list[tuple[int, int]]] = {}
    for place, (ref, gradient) in enumerate(zip(segment.takes, segment.returned, strict=True)):
        group = graph.sums.get(ref.index) if ref.kind is PARAMETER and gradient is not None else None
        if group is not None:
            sums.setdefault(group, []).append((place, ref.index))
    return Ranks(
        groups,
        tuple((group, tuple(places)) for group, places in sums.items()),
        tuple(segment.takes.index(ref) for ref in refs),
        tuple((kept.index(ref), number) for number, ref in enumerate(refs) if ref in kept),
    )


def _build_backward(
    segment: SegmentPlan,
    graph: Graph,
    notes: Sequence[Ref],
    forward_slots: SlotMap,
    loaded: Loaded,
    known: _ParameterRefs,
) -> Backward | None:
    if not segment.backward or segment.recorded:
        return None
    kept = [k.ref for k in segment.kept]
    given = [*(r for r in segment.arriving if r is not None), *kept]
    made = {r for s in segment.late for r in s.writes()}
    read = [r for r in dict.fromkeys(r for s in segment.late for r in s.reads()) if r not in made]
    now = [r for r in segment.returned if r is not None and r not in made]
    steps = segment.backward[: len(segment.backward) - segment.delayed]
    backward, slots = build_program(steps, given, [*now, *read], loaded)
    gradients = _places(segment.returned, now, backward, slots)
    marked = marked_refs(graph.nodes[segment.start : segment.stop])
    late = None
    if made:
        weights = [r for r in segment.returned if r in made]
        program, own = build_program(segment.late, read, weights, loaded)
        places = tuple(k for k, r in enumerate(segment.returned) if r in made)
        picker = _picker(_places(segment.returned, weights, program, own))
        late = Late(program, tuple(slots[r] for r in read), places, picker)
    return Backward(
        backward,
        _picker(tuple(forward_slots[r] for r in kept)),
        tuple((k, segment.takes.index(r)) for k, r in enumerate(kept) if r in marked),
        tuple((k, segment.takes.index(r)) for k, r in enumerate(kept) if r in known.written),
        tuple(k for k, r in enumerate(kept) if r in known.joined),
        tuple((forward_slots[r], slots[r]) for r in notes if r in slots),
        tuple(None if r is None else slots[r] for r in segment.arriving),
        gradients,
        _picker(gradients),
        any(d.overwrites for s in segment.backward if (d := s.task.description) is not None),
        tuple(slots[r] for r in kept if r in known.zeroed),
        slots.numbers.get(LEFT, -1),
        late,
    )


def _places(returned: Sequence[Ref | None], made: Container[Ref], program: Program, slots: SlotMap) -> tuple[int, ...]:
    return tuple(slots[r] if r is not None and r in made else program.size for r in returned)


def _build(
    segment: SegmentPlan,
    plan: Plan,
    loaded: Loaded,
    known: _ParameterRefs,
    stops: bool,
    groups: tuple[Group, ...],
    last_read: tuple[int, ...],
) -> Segment:
    steps = segment.forward
    notes = list(dict.fromkeys(s.task.notes for s in steps if s.task.notes is not None))
    held = [*segment.gives, *(k.ref for k in segment.kept), *notes]
    forward, slots = build_program(steps, segment.takes, held, loaded)
    return Segment(
        segment,
        SEED in segment.takes,
        forward,
        tuple(slots[r] for r in segment.gives),
        _aliased(segment.takes, segment.gives, steps),
        plan.x.device.type,
        stops and not segment.backward and not segment.recorded,
        last_read,
        _among_ranks(segment, plan.graph, groups),
        _build_backward(segment, plan.graph, notes, slots, loaded, known),
    )


def _picker(places: tuple[int, ...]) -> Picker:
    if len(places) > 1:
        return operator.itemgetter(*places)
    return lambda items: tuple(items[k] for k in places)


def _aliased(inputs: Sequence[Ref], outputs: Sequence[Ref], steps: Sequence[Step]) -> tuple[bool, ...]:
    same: dict[Ref, Ref] = {}
    for step in steps:
        for new, old in step.task.aliases:
            same[new] = same.get(old, old)
    seen = set(inputs)
    flags = []
    for ref in outputs:
        real = same.get(ref, ref)
        flags.append(real in seen)
        seen.add(real)
    return tuple(flags)

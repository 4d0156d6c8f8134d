"""Passes over a list of ops: no-ops, DTensors, what ranks have of each value, autocast's casts, collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from te_fuser.distributed.placement import Entering, Entry, Placement, Replicated, Shard
from te_fuser.distributed.shard import Share
from te_fuser.dtypes import text_of
from te_fuser.formula.evaluate import rounds
from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp
from te_fuser.ops import op_table
from te_fuser.ops.autocast import AUTOCAST, cast_to
from te_fuser.ops.base import LoweredOp, output_specs
from te_fuser.ops.operations import marked_parameters
from te_fuser.sharding.rules import ShardingContext, joint_ops, rule_of

if TYPE_CHECKING:
    from te_fuser.distributed.dtensor import Lies
    from te_fuser.distributed.group import Group
    from te_fuser.params.binding import Key

Pass = Callable[[Sequence[ListedOp], CallSpecs], Sequence[ListedOp]]


def drop_noops(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list without the ops that do nothing in this call, as what they work by is not there."""
    rows = {kind: op_table.idles_without.of(kind) for kind in {type(item.lowered.op) for item in listed}}
    if not any(rows.values()):
        return listed
    known = {*call.named, *[name for item in listed for name in item.names_out]}

    def works(item: ListedOp) -> bool:
        by = rows[type(item.lowered.op)]
        return not by or any(argument in by and name in known for argument, name in item.names_in.items())

    return [item for item in listed if works(item)]


def entries(listed: Iterable[ListedOp]) -> Iterable[tuple[str, object]]:
    """Each op as text: its kind, its place and what the call makes of it."""
    for item in listed:
        more = [f"reads {name} in {text_of(dtype)}" for name, dtype in item.casts.items()]
        more += [f"sums the gradient of {name} over {group.size} ranks" for name, group in item.summed.items()]
        more += ["draws for its part"] if item.share is not None else []
        yield "; ".join([f"{item.lowered.op.kind.__name__} {item.path!r}", *more]), item


def check_dtensors(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as it is, if each DTensor lies as its op takes it: each rank runs on its own part."""
    there = {key: (*p.joined, *([] if p.lies is None else [p.lies])) for key, p in call.parameters.items()}
    if not any(there.values()):
        return listed
    for place, item in enumerate(listed):
        for name, binding in item.lowered.bindings.items():
            for lies in there[binding.key]:
                _check(place, item, name, lies)
    return listed


def _check(place: int, item: ListedOp, name: str, lies: Lies) -> None:
    op, here = item.lowered.op, f"op {place} ({item.lowered.op.kind.__name__} {item.path!r}), on rank {dist.get_rank()}"
    if name in marked_parameters(op, tuple(item.lowered.bindings)):
        raise TypeError(
            f"{here}: accumulate_into_main_grad takes plain parameters, and {name} is a DTensor: leave it out, and "
            "autograd gives its gradient"
        )
    cut = rule_of(op).cuts(op).get(name)
    if lies.is_whole() if cut is None else lies.is_cut(*cut):
        return
    takes = "whole in each rank" if cut is None else f"cut along dimension {cut[0]} by the ranks of {cut[1].title}"
    raise TypeError(
        f"{here}: parameter {name} is a DTensor on {lies.mesh} with {list(lies.placements)}, and the op takes "
        f"it {takes}: te_fuser.parallelize(model, mesh['tp']) cuts both alike; what fully_shard cut is whole in "
        "a call of the module that it was given, and after its unshard()"
    )


def autocast(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    exact = call.x.dtype == torch.float64 and not rounds()  # then every op gives float64, whatever it says
    if call.autocast is None or exact:
        return listed
    flow = _Flow(call, call.autocast)
    return [item for op in listed for item in flow.run(op)]


class _Flow:
    """Specs of the main value and of named ones, from op to op."""

    def __init__(self, call: CallSpecs, target: torch.dtype) -> None:
        self.target, self.x, self.parameters = target, call.x, call.parameters
        self.named = {name: spec for name, (spec, _) in call.named.items()}

    def run(self, item: ListedOp) -> Iterable[ListedOp]:
        """One op, and what comes before it."""
        runs_in = AUTOCAST.of(type(item.lowered.op)).runs_in
        wanted: torch.dtype | None = None  # that torch.autocast runs the op in; None where it leaves the op alone
        if runs_in not in (None, "follow") and self.x.dtype != torch.float64 and self.x.dtype.is_floating_point:
            in_float32 = torch.float32 if self.x.device.type == "cuda" else None
            wanted = self.target if runs_in == "lower" else in_float32
        if wanted is not None and self.x.dtype != wanted:
            cast = LoweredOp(cast_to(wanted), {})
            yield ListedOp(cast, f"{item.path}.cast", {}, (), stream=item.stream)
            self.x = replace(self.x, dtype=wanted)
        given = {name: self.parameters[b.key].spec.dtype for name, b in item.lowered.bindings.items()}
        yield replace(item, casts=_casts(runs_in, self.x.dtype, given, self.target, wanted))
        self._pass_through(item)

    def _pass_through(self, item: ListedOp) -> None:
        named = {arg: self.named[name] for arg, name in item.names_in.items() if name in self.named}
        try:
            found = output_specs(item.lowered.op, self.x, named)
            outputs = zip(item.names_out, item.lowered.op.named_outputs(), strict=True)
            self.named.update({name: found[own] for name, own in outputs})
        except (ValueError, TypeError, LookupError):
            return  # the graph says which op it is
        self.x = found["output"]


def _casts(
    runs_in: str | None,
    x: torch.dtype,
    parameters: Mapping[str, torch.dtype],
    target: torch.dtype,
    wanted: torch.dtype | None,
) -> dict[str, torch.dtype]:
    """Name -> dtype of the parameters that are cast for an op, which runs in `x`."""
    if runs_in == "lower" and x == target:
        return {name: x for name, dtype in parameters.items() if dtype != x}
    if runs_in == "follow" and x == target or runs_in == "float32" and x == wanted:
        return {name: x for name, dtype in parameters.items() if dtype not in (x, torch.float64)}
    return {}


def add_placements(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list, each op with those of its parameters whose gradients are to be added up over ranks that share the list.

    An op that draws gets this rank's share of its input.
    """
    entries = _entries(listed)
    if not entries:
        return listed
    shapes = {key: p.spec.shape for key, p in call.parameters.items()}
    needing = frozenset(name for name, (_, needs) in call.named.items() if needs and call.grad)
    return _walked(listed, entries, shapes, needing)


def with_placements(listed: Sequence[ListedOp]) -> Sequence[ListedOp]:
    """Ops with their sums and what enters them, of a list without a call."""
    entries = _entries(listed)
    bindings = [b for item in listed for b in item.lowered.bindings.values()] if entries else []
    return _walked(listed, entries, {b.key: b.shape() for b in bindings}, frozenset())


def _entries(listed: Sequence[ListedOp]) -> Entering:
    """Entries by ranks that share ops: as known at the first op, else as the first of these takes."""
    found = {**listed[0].entering} if listed else {}
    for one in joint_ops([item.lowered.op for item in listed]):
        if one.takes is not None:
            found.setdefault(one.group, Entry(one.takes, one.takes))
    return found


def _walked(
    listed: Sequence[ListedOp], entries: Entering, shapes: Mapping[Key, tuple[int, ...]], needing: frozenset[str]
) -> Sequence[ListedOp]:
    for group, entry in sorted(entries.items(), key=lambda one: not one[1].start.outer):
        listed = _Walk(listed, group, shapes, needing).found(entry)
    return listed


class _Walk:
    """The list from its first op to its last, for the ranks of one group."""

    def __init__(
        self, listed: Sequence[ListedOp], group: Group, shapes: Mapping[Key, tuple[int, ...]], needing: frozenset[str]
    ) -> None:
        self._listed, self._group, self._shapes, self._needing = listed, group, shapes, needing
        self._place = 0

    def found(self, entry: Entry) -> Sequence[ListedOp]:
        """The list with sums, and what enters each op; ValueError naming an op."""
        try:
            return list(self._from(entry))
        except ValueError as error:
            op, path = self._listed[self._place].lowered.op, self._listed[self._place].path
            raise ValueError(f"op {self._place} ({op.kind.__name__} {path!r}): {error}") from error

    def _from(self, entry: Entry) -> Iterable[ListedOp]:
        x, start, bound = entry.x, entry.start, entry.named
        for place, item in enumerate(self._listed):
            self._place = place
            op, low = item.lowered.op, item.lowered
            rule = rule_of(op)
            item = replace(item, entering={**item.entering, self._group: Entry(x, start, bound)})
            named = {argument: bound[name] for argument, name in item.names_in.items() if name in bound}
            shapes = {name: self._shapes[b.key] for name, b in item.lowered.bindings.items()}
            context = ShardingContext(self._group, start, named, shapes)
            self._check_gradients(item, x)
            # Of sequences that are cut for the whole model an engine adds up all gradients, as of samples.
            summed = {} if start.outer else dict.fromkeys(rule.partial_gradients(op, x, context), self._group)
            own = rule.local(op, x, context)
            if own is not op:
                item = replace(item, lowered=replace(low, op=own))
            drawn, x = rule.draws_for(op, x, context), rule.gives(op, x, context)
            if not isinstance(x, Placement):
                raise ValueError(f"{type(rule).__name__}.gives() gave {x!r}: give a Placement of te_fuser.parallel")
            bound = {**bound, **dict.fromkeys(item.names_out, x)} if item.names_out else bound
            share = None if not op.draws() or isinstance(drawn, Replicated) else _share(drawn, self._group, item.share)
            if summed or share is not None:
                item = replace(item, summed={**item.summed, **summed}, share=share or item.share)
            yield item

    def _check_gradients(self, item: ListedOp, x: Placement) -> None:
        """Refuse inputs for all rows or features where each rank has a term of their gradient."""
        for argument, name in item.names_in.items() if self._needing else ():
            axes = item.lowered.op.named_inputs()[argument].axes
            if name not in self._needing or axes is None:
                continue
            by_rows = x.by_rows or x == Replicated(gathered=True)
            missing = Axes.FEATURE if x == Shard(-1) else Axes.OUTER if by_rows else None
            if missing is not None and not axes & missing:
                raise ValueError(
                    f"{name.rsplit('/', 1)[-1]!r} needs a gradient, of which each rank has a term alone, as x is {x}: "
                    "give it detached, or put what makes it into the list"
                )


def _share(x: Placement, group: Group, other: Share | None) -> Share:
    """A rank's share of what an op draws for; `other`: that of groups that cut sequences before."""
    known = other or Share()
    if not (isinstance(x, Shard) and x.by_rows):
        return replace(known, columns=(group, *known.columns))
    if known.rows and known.dim != x.dim:
        raise ValueError(
            f"it draws for rows that ranks cut along two dimensions, {known.dim} and {x.dim}: cut them along one"
        )
    return replace(known, rows=(*known.rows, group), dim=x.dim)


def add_collectives(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as each rank runs it; ValueError when an op cannot be cut into equal parts."""
    if not [item for item in listed if item.entering]:
        return listed
    return [new for place, item in enumerate(listed) for new in _on_rank(place, item)]


def _on_rank(place: int, item: ListedOp) -> Iterable[ListedOp]:
    op = item.lowered.op
    try:
        ops = rule_of(op).local_ops(op)
    except ValueError as error:
        raise ValueError(f"op {place} ({op.kind.__name__} {item.path!r}): {error}") from error
    if ops == (op,):
        yield item
        return
    read = {given.name: item.names_in[argument] for argument, given in op.named_inputs().items()}
    for one in ops:
        names_in = {
            argument: read.get(given.name, f"{item.path}//{given.name}")
            for argument, given in one.named_inputs().items()
        }
        if one.kind is op.kind:
            yield replace(item, lowered=replace(item.lowered, op=one), names_in=names_in)
            continue
        one.train(op.training)
        names_out = tuple([f"{item.path}//{name}" for name in one.named_outputs()])
        lowered, path = LoweredOp(one, {}), f"{item.path}.{one.kind.role}"
        yield replace(item, lowered=lowered, path=path, names_in=names_in, names_out=names_out, casts={}, summed={})


def gradient_sums(listed: Sequence[ListedOp], numbers: Mapping[Key, int]) -> dict[int, Group]:
    """The parameters, by their numbers, whose gradients are added up, and over which ranks."""
    found: dict[int, Group] = {}
    if not [item for item in listed if item.summed]:
        return found
    read: dict[int, ListedOp] = {}
    for item in listed:
        for name, binding in item.lowered.bindings.items():
            number, group = numbers[binding.key], item.summed.get(name)
            if number in read and group != found.get(number):
                raise ValueError(
                    f"{read[number].path!r} and {item.path!r} read one parameter, of whose gradient ranks have a term "
                    "by the one and all by the other: let both read values that ranks have alike"
                )
            read[number] = item
            found.update({} if group is None else {number: group})
    return found

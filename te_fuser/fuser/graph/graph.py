"""The list of ops as a graph: nodes in order, the values between them, named side edges, and what needs a gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from te_fuser.dtypes import FLOATING
from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.alike import Kinds, Told, is_identity
from te_fuser.fuser.graph.checks import (
    check_input,
    check_named,
    check_outputs,
    check_parameters,
    check_some_features,
    plain,
)
from te_fuser.fuser.graph.gradients import check_gives_gradients, is_differentiable, with_gradients
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp, outputs_of
from te_fuser.fuser.graph.lowering import lower
from te_fuser.fuser.graph.refs import AS_MADE, RECOMPUTED, VALUE, Form, Ref
from te_fuser.fuser.graph.spread import gradient_sums
from te_fuser.ops.base import FusableOperation, Gradient, NamedInput, Place, Spec
from te_fuser.ops.binding import Binding, Key, StandIns, standing_in
from te_fuser.ops.row_op import RowOp
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.ops.dtensor import Lies
    from te_fuser.ops.group import Group
    from te_fuser.ops.share import Share


@record()
class Value:
    """A tensor on an edge.

    Attributes:
        alias_of: the value that it is under another name (Fork, Identity), maybe in another form.
        gradient: the dtype in which its gradient arrives, where that is not its own.
    """

    index: int
    name: str
    spec: Spec
    axes: Axes | None
    needs_grad: bool
    alias_of: int | None = None
    gradient: torch.dtype | None = None

    @property
    def gradient_dtype(self) -> torch.dtype:
        """The dtype in which its gradient arrives."""
        return self.spec.dtype if self.gradient is None else self.gradient

    @property
    def gradient_spec(self) -> Spec:
        """Shape, dtype and device of its gradient."""
        return self.spec if self.gradient is None else dataclasses.replace(self.spec, dtype=self.gradient)


@record()
class Node:
    """One elementary op in its place."""

    index: int
    op: FusableOperation
    label: str  # for messages: "op 3 (GELU '2.gelu')"
    role: str  # for kernel text: "gelu"
    parameters: Mapping[str, int]
    input: int
    output: int
    named_in: Mapping[str, int]
    named_out: tuple[int, ...]
    draws: bool
    stream: int  # the number of its random stream
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)
    path: str = ""  # in the module tree
    places: tuple[Place, ...] = ()  # in fused operations
    likeness: int = -1  # equal for ops of this list that are alike, whatever their parameters are
    is_row: bool = False  # whether a formula gives it
    reads: Mapping[str, NamedInput] = field(default_factory=dict)  # its named inputs, also those that are not given
    gradients: tuple[Gradient, ...] = ()  # the nodes of an opaque op's backward
    share: Share | None = None  # what this rank has of its input, for what it draws; None: all


@dataclass(frozen=True)
class Graph:
    """Nodes in order, values, parameters; which values come from the call and which leave it."""

    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    parameters: tuple[Binding, ...]
    parameter_specs: tuple[Spec, ...]
    parameter_needs: tuple[bool, ...]
    parameter_tensors: tuple[Callable[[], torch.Tensor], ...]  # while planning: of what is computed, a stand-in
    named_inputs: Mapping[str, int]
    output: int
    named_outputs: Mapping[str, int]
    stand_ins: StandIns  # what stands for the parameters that are computed
    sums: Mapping[int, Group] = field(default_factory=dict)  # parameters of whose gradient each rank has a term
    lies: tuple[Lies | None, ...] = ()  # of each parameter, how it lies among ranks; None of a plain tensor

    @functools.cached_property
    def _roots(self) -> list[int]:
        found: list[int] = []
        for v in self.values:  # an alias comes after what it is one of
            found.append(v.index if v.alias_of is None else found[v.alias_of])
        return found

    @functools.cached_property
    def _refs(self) -> list[Ref]:
        made = [self.values[root].spec.dtype for root in self._roots]
        return [
            Ref(VALUE, root, AS_MADE if v.spec.dtype == dtype else Form(v.spec.dtype))
            for v, root, dtype in zip(self.values, self._roots, made, strict=True)
        ]

    @functools.cached_property
    def _firsts(self) -> dict[Ref, int]:
        found: dict[Ref, int] = {}
        for value, ref in enumerate(self._refs):
            found.setdefault(ref, value)
        return found

    @functools.cached_property
    def _storages(self) -> list[int]:
        found = list(self._roots)
        for n in self.nodes:  # what a node reads comes before what it makes
            for value in (n.output, *n.named_out):
                found[value] = found[n.input] if n.op.views else found[self._roots[value]]
        return found

    @functools.cached_property
    def related(self) -> list[tuple[int, int, int]]:
        """By value the one that it is, the first that is the same tensor, and the first in the same memory."""
        return [
            (root, self._firsts[ref], self._storages[root] if ref.form == AS_MADE else root)
            for root, ref in zip(self._roots, self._refs, strict=True)
        ]

    @functools.cached_property
    def _consumers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.values]
        for n in self.nodes:
            for value in {n.input, *n.named_in.values()}:
                found[value].append(n.index)
        return found

    @functools.cached_property
    def _producers(self) -> list[int | None]:
        found: list[int | None] = [None] * len(self.values)
        for n in self.nodes:
            for value in (n.output, *n.named_out):
                found[value] = n.index
        return found

    @functools.cached_property
    def _leaving(self) -> frozenset[int]:
        return frozenset([self.output, *self.named_outputs.values()])

    def exact(self) -> Graph:
        """The same with plain sizes."""
        return self._seen(Spec.exact)

    def rounded(self) -> Graph:
        """The same as prices see it: with plain sizes, those of the call rounded up to the grid."""
        return self._seen(Spec.rounded)

    @property
    def is_on_grid(self) -> bool:
        """Whether the sizes of the call are as prices see them."""
        specs = {id(v.spec): v.spec for v in self.values}
        return all(spec.exact() == spec.rounded() for spec in specs.values())

    def _seen(self, view: Callable[[Spec], Spec]) -> Graph:
        specs = {id(v.spec): v.spec for v in self.values}
        seen = {key: view(spec) for key, spec in specs.items()}
        values = [
            Value(v.index, v.name, seen[id(v.spec)], v.axes, v.needs_grad, v.alias_of, v.gradient) for v in self.values
        ]
        return dataclasses.replace(self, values=tuple(values))

    @property
    def widest(self) -> torch.dtype:
        """float64 where any value or gradient is, else that of the first value which row ops could take."""
        dtypes = [d for v in self.values for d in (v.spec.dtype, v.gradient_dtype)]
        known = (d for d in dtypes if d in FLOATING.values())
        return torch.float64 if torch.float64 in dtypes else next(known, dtypes[0])

    @property
    def coarsest(self) -> float:
        """The eps of the narrowest dtype that row ops could take, of those that values have."""
        dtypes = {v.spec.dtype for v in self.values} & {*FLOATING.values()}
        return max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)

    def arithmetic(self, node: Node) -> torch.dtype:
        """The dtype that an op computes in, as far as it tells: its input's, or that of an output."""
        dtypes = [self.values[v].spec.dtype for v in (node.input, node.output, *node.named_out)]
        return next((d for d in dtypes if d in FLOATING.values()), torch.float32)

    def root(self, value: int) -> int:
        """The value that this one is, under another name."""
        return self._roots[value]

    def ref(self, value: int) -> Ref:
        """The tensor of a value: that of the value that it is, in its own form."""
        return self._refs[value]

    def again(self, value: int) -> Ref:
        """The same tensor, computed again in backward."""
        return self._refs[value]._replace(kind=RECOMPUTED)

    def first(self, value: int) -> int:
        """The first value that is this tensor: the same value in the same form."""
        return self._firsts[self._refs[value]]

    def value_of(self, ref: Ref) -> int:
        """The first value that is this tensor, or that it is computed again for."""
        return self._firsts[ref.by_rows._replace(kind=VALUE)]

    def stored(self, ref: Ref) -> Ref:
        """The first name of the memory of a tensor: a value may be a view of an earlier one."""
        return self._refs[self._storages[ref.index]] if ref.kind is VALUE and ref.form == AS_MADE else ref

    def owner(self, ref: Ref) -> str:
        """Whose memory a tensor is where it is kept for backward; empty: it is never kept."""
        given = ref.kind is VALUE and ref.form.layout == "rows" and self.producer(self.stored(ref).index) is None
        return "input" if given else ref.owner

    def needs_grad(self, value: int) -> bool:
        """Whether somebody upstream of this value needs a gradient."""
        return self.values[value].needs_grad

    def consumers(self, value: int) -> list[int]:
        """The nodes that read this value."""
        return self._consumers[value]

    def producer(self, value: int) -> int | None:
        """The node that makes this value; None for inputs of the call."""
        return self._producers[value]

    def leaves(self, value: int) -> bool:
        """Whether the caller gets this value."""
        return value in self._leaving

    def leaving(self, start: int, stop: int) -> list[int]:
        """The values made by the nodes start..stop-1 that somebody else reads."""
        made = [v for n in self.nodes[start:stop] for v in (n.output, *n.named_out)]
        return [v for v in made if self.leaves(v) or any(not start <= c < stop for c in self.consumers(v))]


class GraphBuilder:
    """Builds the graph of a flattened list, lowered for one call signature."""

    def __init__(self, ops: Sequence[ListedOp], call: CallSpecs) -> None:
        self.listed, self.ops, self.call = ops, lower(ops, call), call
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.bindings = tuple([b.weak() for b in call.bindings])
        self.parameters: dict[Key, int] = {b.key: k for k, b in enumerate(call.bindings)}
        self.bound: dict[str, int] = {}
        self.read: set[str] = set()  # of the names that are open
        self.opened: dict[str, str] = {}
        self.named_inputs: dict[str, int] = {}
        self.exported: dict[str, list[tuple[str, int]]] = {}
        self.kinds = Kinds()
        self.checked: dict[Hashable, int] = {}
        self.told: dict[Hashable, Told] = {}

    def build(self) -> Graph:
        """Run through the list once; every error in the list or in the inputs is raised here."""
        with standing_in(self.call.stand_ins()):
            return self._build()

    def _build(self) -> Graph:
        current = self._value("input", self.call.x, Axes.FULL, self.call.x_needs_grad and self.call.grad)
        for listed in self.ops:
            current = self._append(listed, current)
        self._check_names()
        asked = {name: v for name, v in self.named_inputs.items() if self.values[v].needs_grad}
        check_gives_gradients(self.nodes, asked)
        self.values = with_gradients(
            self.nodes, self.values, {current, *(self._exported(name) for name in self.call.outputs)}
        )
        known = [self.call.parameters[b.key] for b in self.bindings]
        return Graph(
            tuple(self.nodes),
            tuple(self.values),
            self.bindings,
            tuple(p.spec for p in known),
            tuple(self.call.grad and p.requires_grad for p in known),
            tuple(p.stand_in if p.computed else b.get for b, p in zip(self.bindings, known, strict=True)),
            self.named_inputs,
            current,
            {name: self._exported(name) for name in self.call.outputs},
            {b.key: p.stand_in for b, p in zip(self.bindings, known, strict=True) if p.computed},
            sums=gradient_sums(self.ops, self.parameters),
            lies=tuple(p.lies for p in known),
        )

    def _value(self, name: str, spec: Spec, axes: Axes | None, needs: bool, alias: int | None = None) -> int:
        value = Value(len(self.values), name, spec, axes, needs, alias)
        self.values.append(value)
        return value.index

    def _append(self, listed: ListedOp, current: int) -> int:
        op, bindings = listed.lowered.op, listed.lowered.bindings
        label = self._label(listed)
        kind = self.kinds.of(label, op, bindings)
        parameters, known = {}, {}
        for name, b in bindings.items():
            parameters[name] = self.parameters[key := b.key]
            known[name] = self.call.parameters[key]
        # What is alike is checked once.
        x, checked = self.values[current].spec, len(self.checked)
        given = [(name, p.spec.key, p.kind, p.lies) for name, p in known.items()]
        like = self.checked.setdefault((kind, x.key, *listed.casts.items(), *given), checked)
        if like == checked:
            check_input(label, op, x)
            check_some_features(label, op, x)
        if kind.is_row:
            self._tie_features(current)
        named_in = self._named(label, listed, kind.reads, self.values[current].spec) if listed.names_in else {}
        x = self.values[current].spec
        if like == checked:
            check_parameters(label, x, listed, known, self.call.autocast is None)
        told = self._told(label, op, like, x, {arg: self.values[v].spec for arg, v in named_in.items()})
        needs = self.call.grad and (
            self.values[current].needs_grad
            or True in [p.requires_grad for p in known.values()]
            or True in [self.values[v].needs_grad and kind.reads[arg].gradient for arg, v in named_in.items()]
        )
        alias, needed = current if told.same else None, needs and "output" in told.differentiable
        output = self._value(f"{kind.role}.output", told.specs["output"], Axes.FULL, needed, alias)
        named_out = self._named_out(label, listed, told, output, needs) if listed.names_out else ()
        self.nodes.append(
            Node(
                len(self.nodes),
                op,
                label,
                kind.role,
                parameters,
                current,
                output,
                named_in,
                named_out,
                kind.draws,
                listed.stream,
                listed.casts,
                listed.path,
                listed.lowered.places,
                kind.number,
                kind.is_row,
                kind.reads,
                kind.gradients(op, (*parameters, *named_in)),
                listed.share,
            )
        )
        return output

    def _named_out(self, label: str, listed: ListedOp, told: Told, output: int, needs: bool) -> tuple[int, ...]:
        """The values that an op names, each bound to its name in the list."""
        op, found = listed.lowered.op, []
        axes = Axes.FULL if isinstance(op, RowOp) else None  # else who reads it says what its sizes are
        for name, own in zip(listed.names_out, op.named_outputs(), strict=True):
            called, same = (f"{op.kind.role}.{own}", None) if own in op.values else (name, output)
            needed = needs and own in told.differentiable
            found.append(self._value(called, told.specs[own], axes, needed, same))
            self._bind(label, name, op, found[-1])
        return tuple(found)

    def _tie_features(self, value: int) -> None:
        """What a formula reads has so many features in every call of a plan."""
        v = self.values[value]
        if type(v.spec.features) is not int:
            self.values[value] = dataclasses.replace(v, spec=_with_tied_features(v.spec))

    def _label(self, listed: ListedOp) -> str:
        return f"op {len(self.nodes)} ({listed.lowered.op.kind.__name__}{_where(listed)})"

    def _named(self, label: str, listed: ListedOp, named: Mapping[str, NamedInput], x: Spec) -> dict[str, int]:
        found: dict[str, int] = {}
        for argument, name in listed.names_in.items():
            given = named[argument]
            if name in self.bound:
                self.read.add(name)
                value = self.bound[name]
            elif name in self.call.named:
                value = self._call_input(name, given)
            elif given.optional:
                continue
            else:
                raise ValueError(self._missing(label, name, listed.lowered.op))
            if given.axes is not None and given.axes & Axes.FEATURE:
                self._tie_features(value)
            check_named(label, name, given, x, self.values[value].spec, listed.lowered.op.batch_dim())
            if self.values[value].axes is None:
                self.values[value] = dataclasses.replace(self.values[value], axes=given.axes)
            found[argument] = value
        return found

    def _missing(self, label: str, name: str, op: FusableOperation) -> str:
        later = [o for o in self.ops if name in o.names_out]
        hint = "a later op binds it; move the Fork before its use" if later else f"pass it: model(x, {plain(name)}=...)"
        given = ", ".join(sorted(self.call.named)) or "none"
        what = f"{label} reads {plain(name)!r}, which no Fork before it binds and the call does not give"
        forgotten = [p for p in op._parameters if isinstance(op, RowOp) and p not in op.arguments()]
        mistaken = f"; parameters that compute() does not take: {', '.join(forgotten)}" if forgotten else ""
        return f"{what} ({hint}; given: {given}{mistaken})"

    def _call_input(self, name: str, given: NamedInput) -> int:
        if name not in self.named_inputs:
            spec, needs = self.call.named[name]
            self.named_inputs[name] = self._value(name, spec, given.axes, needs and self.call.grad)
        return self.named_inputs[name]

    def _told(
        self,
        label: str,
        op: FusableOperation,
        like: int,
        x: Spec,
        named: Mapping[str, Spec],
    ) -> Told:
        """What an op says of its outputs; once for all that are alike."""
        key = like, x.key, *[(name, spec.key) for name, spec in named.items()]
        if key not in self.told:
            specs = self._infer(label, op, x, named)
            check_outputs(label, op, specs)
            if isinstance(op, RowOp):
                specs = {name: _with_tied_features(spec) for name, spec in specs.items()}
            able = frozenset([name for name, spec in specs.items() if is_differentiable(op, name, spec)])
            self.told[key] = Told(specs, able, isinstance(op, RowOp) and is_identity(op, x))
        return self.told[key]

    def _infer(self, label: str, op: FusableOperation, x: Spec, named: Mapping[str, Spec]) -> dict[str, Spec]:
        try:
            op.check_inputs(x, dict(named))
            return outputs_of(op, x, named)
        except (ValueError, TypeError) as error:
            raise type(error)(f"{label}: {error}") from error

    def _bind(self, label: str, name: str, op: FusableOperation, value: int) -> None:
        if op.exports:
            self.exported.setdefault(name, []).append((label, value))
            return
        if name in self.opened and name not in self.read:
            raise ValueError(f"{label} opens {plain(name)!r}, which {self.opened[name]} opened and nobody closed yet")
        self.read.discard(name)
        self.bound[name] = value
        if op.may_stay_unread:
            self.opened.pop(name, None)
        else:
            self.opened[name] = label

    def _exported(self, name: str) -> int:
        close = [n for n in self.exported if plain(n) == name]
        found = self.exported.get(name) or (self.exported[close[0]] if len(close) == 1 else [])
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(label for label, _ in found)} both give {plain(name)!r}; rename one of them"
            )
        if found:
            return found[0][1]
        if name in self.bound:
            return self.bound[name]
        known = ", ".join(sorted(self.exported)) or "none"
        raise ValueError(
            f"no Output({name!r}) in the list (outputs: {known})" + (": name one by its path" if close else "")
        )

    def _check_names(self) -> None:
        for name, label in self.opened.items():
            # An op that runs alone opens nothing for others.
            if name not in self.read and name not in self.call.outputs and len(self.ops) > 1:
                raise ValueError(
                    f"{label} opens {plain(name)!r}, but no Add({plain(name)!r}) after it closes it; "
                    "add one, or use Output to hand the value to the caller"
                )
        unknown = sorted(set(self.call.named) - set(self.named_inputs) - self._readable())
        if unknown:
            takes = ", ".join(sorted(self._readable())) or "none"
            raise TypeError(f"unknown input {unknown[0]!r}: no op of this list reads it (named inputs: {takes})")

    def _readable(self) -> set[str]:
        # Also by an op that does nothing in this call, as another list may give it for what stands behind this one.
        return {name for o in self.listed for name in o.names_in.values() if "/" not in name}


def _with_tied_features(spec: Spec) -> Spec:
    return dataclasses.replace(spec, shape=(*spec.shape[:-1], *map(int, spec.shape[-1:])))


def _where(listed: ListedOp) -> str:
    return f" {listed.path!r}" if listed.path else ""

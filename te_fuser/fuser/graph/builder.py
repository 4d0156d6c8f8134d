"""A list of ops becomes a graph, on one way through it: ops that are alike, names, and every error in list or input."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from te_fuser.formula.expr import Axes, leaf
from te_fuser.fuser.graph.checks import (
    check_input,
    check_kind,
    check_named,
    check_outputs,
    check_parameters,
    check_some_features,
    plain,
)
from te_fuser.fuser.graph.graph import (
    Draw,
    Graph,
    Node,
    Value,
    check_gives_gradients,
    is_differentiable,
    with_gradients,
)
from te_fuser.fuser.graph.list_passes import gradient_sums
from te_fuser.ops import op_table
from te_fuser.ops.base import output_specs
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.row_op import RowOp
from te_fuser.params.binding import standing_in
from te_fuser.params.scales import Aside

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping, Sequence

    from te_fuser.fuser.graph.op_instances import CallSpecs, ListedOp, ParameterSpecs
    from te_fuser.ops.base import FusableOperation, Gradient, NamedInput, Spec
    from te_fuser.params.binding import Binding, Key

_OF_EVERY_MODULE = {*vars(torch.nn.Module()), "revision"}


def likeness(op: FusableOperation) -> Hashable:
    """Key, equal for ops of one class with equal attributes; else the op itself."""
    own = [(name, type(value), value) for name, value in vars(op).items() if name not in _OF_EVERY_MODULE]
    found = [what for what in own if Aside not in what[1].__mro__]
    buffers = set(op._buffers)
    if buffers:  # without those that are no part of what an op is
        buffers.difference_update(*[value.buffers() for _, _, value in own if isinstance(value, Aside)])
    if op._modules or buffers:
        return id(op)
    try:
        hash(tuple(found))
    except TypeError:
        return id(op)
    return type(op), op.training, *found


@dataclass(frozen=True, eq=False)
class Traits:
    """Traits of the ops of a list that are alike and have parameters of the same names."""

    number: int
    role: str  # for kernel text: "gelu"
    draws: bool
    is_row: bool
    reads: Mapping[str, NamedInput]
    gradient_dtype: Callable[[Any, torch.dtype], torch.dtype] | None  # its row in `ops.op_table`
    _gradients: dict[tuple[str, ...], tuple[Gradient, ...]] = field(default_factory=dict)

    def gradients(self, op: FusableOperation, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """The backward nodes of an op with parameters and inputs of these names."""
        if names not in self._gradients:
            self._gradients[names] = tuple(op.gradients(names)) if isinstance(op, UnfusedOperation) else ()
        return self._gradients[names]


class Inferred(NamedTuple):
    """Inferred outputs of ops that are alike: the specs, and which can have gradients."""

    specs: Mapping[str, Spec]
    differentiable: frozenset[str]
    same: bool  # the output is the input


def is_identity(op: RowOp, given: Spec) -> bool:
    """True where the formula hands its input through."""
    if op_table.hands_through.of(type(op)):
        return True
    if op.arguments():
        return False
    x = leaf("x", Axes.FULL, given.features)
    try:
        return op.compute(x) is x and op.output_dtype(given.dtype) == given.dtype
    except (ValueError, TypeError, AttributeError):
        return False


class Names:
    """The values that names stand for; `inputs`: named ones of the call that ops read."""

    def __init__(self, listed: Sequence[ListedOp], lowered: Sequence[ListedOp], call: CallSpecs) -> None:
        self.inputs: dict[str, int] = {}
        self._listed, self._lowered, self._call = listed, lowered, call
        self._bound: dict[str, int] = {}
        self._opened: dict[str, str] = {}  # name -> the op that opened it
        self._read: set[str] = set()  # of the names that are open
        self._exported: dict[str, list[tuple[str, int]]] = {}

    def bind(self, label: str, name: str, op: FusableOperation, value: int) -> None:
        """Bind a name from here on; ValueError when an open one was not read yet."""
        if op_table.exports.of(type(op)):
            self._exported.setdefault(name, []).append((label, value))
            return
        if name in self._opened and name not in self._read:
            raise ValueError(f"{label} opens {plain(name)!r}, which {self._opened[name]} opened and nobody closed yet")
        self._read.discard(name)
        self._bound[name] = value
        if op_table.may_stay_unread.of(type(op))(op):
            self._opened.pop(name, None)
        else:
            self._opened[name] = label

    def read(self, name: str) -> int | None:
        """Value that an op reads by this name; None where no op before it binds it."""
        if name not in self._bound:
            return None
        self._read.add(name)
        return self._bound[name]

    def exported(self, name: str) -> int:
        """Value that a caller gets who asks for this output; ValueError when there is none, or several."""
        close = [n for n in self._exported if plain(n) == name]
        found = self._exported.get(name) or (self._exported[close[0]] if len(close) == 1 else [])
        if len(found) > 1:
            raise ValueError(
                f"{' and '.join(label for label, _ in found)} both give {plain(name)!r}; rename one of them"
            )
        if found:
            return found[0][1]
        if name in self._bound:
            return self._bound[name]
        known = ", ".join(sorted(self._exported)) or "none"
        raise ValueError(
            f"no Output({name!r}) in the list (outputs: {known})" + (": name one by its path" if close else "")
        )

    def check(self) -> None:
        """Refuse what nobody read at the end, of ops or of the call."""
        for name, label in self._opened.items():
            # An op that runs alone opens nothing for others.
            if name not in self._read and name not in self._call.outputs and len(self._lowered) > 1:
                raise ValueError(
                    f"{label} opens {plain(name)!r}, but no Add({plain(name)!r}) after it closes it; "
                    "add one, or use Output to hand the value to the caller"
                )
        unknown = sorted(set(self._call.named) - set(self.inputs) - self._readable())
        if unknown:
            takes = ", ".join(sorted(self._readable())) or "none"
            raise TypeError(f"unknown input {unknown[0]!r}: no op of this list reads it (named inputs: {takes})")

    def missing(self, label: str, name: str, reader: ListedOp) -> str:
        """The error for a name that an op reads and nobody gives."""
        op = reader.lowered.op
        hint = give = f"pass it: model(x, {plain(name)}=...)"
        binds = [o for o in self._lowered if plain(name) in map(plain, o.names_out)]
        for o in [o for o in binds if not op_table.exports.of(type(o.lowered.op))]:
            if f"{reader.scope}.".startswith(o.scope and f"{o.scope}."):
                hint = f"{o.path!r}, a later op, binds it: move that before its use"
            else:
                hint = f"{o.path!r} binds it for its own list, {o.scope!r}, alone: put both into one list, or {give}"
        given = ", ".join(sorted(self._call.named)) or "none"
        what = f"{label} reads {plain(name)!r}, which no Fork before it binds and the call does not give"
        forgotten = [p for p in op._parameters if isinstance(op, RowOp) and p not in op.arguments()]
        mistaken = f"; parameters that compute() does not take: {', '.join(forgotten)}" if forgotten else ""
        return f"{what} ({hint}; given: {given}{mistaken})"

    def _readable(self) -> set[str]:
        # Also by an op that does nothing in this call, as another list may give it for what stands behind this one.
        return {name for o in self._listed for name in o.names_in.values() if "/" not in name}


class GraphBuilder:
    """Builds the graph of a list, as it was given and behind its passes, for one call signature."""

    def __init__(self, listed: Sequence[ListedOp], lowered: Sequence[ListedOp], call: CallSpecs) -> None:
        self.ops, self.call = lowered, call
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.bindings = tuple([b.weak() for b in call.bindings])
        self.parameters: dict[Key, int] = {key: k for k, key in enumerate(call.parameters)}
        self.names = Names(listed, lowered, call)
        self.traits: dict[Hashable, Traits] = {}  # by what ops that are alike have in common
        self.checked: dict[Hashable, str] = {}  # -> the label of the first that is alike
        self.told: dict[Hashable, Inferred] = {}

    def build(self) -> Graph:
        """Run through the list once; every error in the list or in the inputs is raised here."""
        with standing_in(self.call.stand_ins()):
            return self._build()

    def _build(self) -> Graph:
        current = self._value("input", self.call.x, Axes.FULL, self.call.x_needs_grad and self.call.grad)
        for listed in self.ops:
            current = self._append(listed, current)
        self.names.check()
        named_inputs = self.names.inputs
        check_gives_gradients(self.nodes, {name: v for name, v in named_inputs.items() if self.values[v].needs_grad})
        outputs = {name: self.names.exported(name) for name in self.call.outputs}
        self.values = with_gradients(self.nodes, self.values, {current, *outputs.values()})
        known = [*self.call.parameters.values()]  # in the order of their bindings
        return Graph(
            tuple(self.nodes),
            tuple(self.values),
            self.bindings,
            tuple([p.spec for p in known]),
            tuple([self.call.grad and p.requires_grad for p in known]),
            tuple([p.stand_in if p.computed else b.get for b, p in zip(self.bindings, known, strict=True)]),
            named_inputs,
            current,
            outputs,
            {b.key: p.stand_in for b, p in zip(self.bindings, known, strict=True) if p.computed},
            sums=gradient_sums(self.ops, self.parameters),
            lies=tuple([p.lies for p in known]),
            notes=tuple(self.call.notes),
        )

    def _value(self, name: str, spec: Spec, axes: Axes | None, needs: bool, alias: int | None = None) -> int:
        value = Value(len(self.values), name, spec, axes, needs, alias)
        self.values.append(value)
        return value.index

    def _append(self, listed: ListedOp, current: int) -> int:
        op, bindings = listed.lowered.op, listed.lowered.bindings
        index = len(self.nodes)
        where = f" {listed.path!r}" if listed.path else ""
        label = f"op {index} ({op.kind.__name__}{where})"
        traits = self._traits(label, op, bindings)
        parameters, known = {}, {}
        for name, b in bindings.items():
            parameters[name] = self.parameters[key := b.key]
            known[name] = self.call.parameters[key]
        like, named_in = self._taken(label, listed, traits, current, known)
        x = self.values[current]
        named = {arg: self.values[v].spec for arg, v in named_in.items()} if named_in else {}
        told = self._told(label, op, like, x.spec, named)
        needs = self.call.grad and (
            x.needs_grad
            or True in [p.requires_grad for p in known.values()]
            or True in [self.values[v].needs_grad and traits.reads[arg].gradient for arg, v in named_in.items()]
        )
        alias, needed = current if told.same else None, needs and "output" in told.differentiable
        output = self._value(f"{traits.role}.output", told.specs["output"], Axes.FULL, needed, alias)
        named_out = self._named_out(label, listed, told, output, needs) if listed.names_out else ()
        self.nodes.append(
            Node(
                index,
                op,
                label,
                traits,
                parameters,
                current,
                output,
                named_in,
                named_out,
                Draw(listed.stream, listed.share),
                listed.casts,
                listed.path,
                listed.lowered.places,
                traits.gradients(op, (*parameters, *named_in)),
            )
        )
        return output

    def _traits(self, label: str, op: FusableOperation, bindings: Mapping[str, Binding]) -> Traits:
        """Traits of an op; of ops that are alike the first is checked for all of them."""
        key = likeness(op), tuple(op._parameters), tuple(bindings)
        found = self.traits.get(key)
        if found is None:
            check_kind(label, op, bindings)
            said = op.kind.role, op.draws(), isinstance(op, RowOp), op.named_inputs()
            found = self.traits[key] = Traits(len(self.traits), *said, op_table.gradient_dtype.of(type(op)))
        return found

    def _taken(
        self, label: str, listed: ListedOp, traits: Traits, current: int, known: Mapping[str, ParameterSpecs]
    ) -> tuple[str, dict[str, int]]:
        """The first op that is alike, checked for all of these; and the named inputs."""
        op, x = listed.lowered.op, self.values[current].spec
        given = [(name, p.spec.key, p.kind, p.lies) for name, p in known.items()]
        like = self.checked.setdefault((traits, x.key, *listed.casts.items(), *given), label)
        if like is label:
            check_input(label, op, x)
            check_some_features(label, op, x)
        if traits.is_row:
            self._tie_features(current)
        named_in = self._named(label, listed, traits.reads, self.values[current].spec) if listed.names_in else {}
        if like is label:
            check_parameters(label, self.values[current].spec, listed, known)
        return like, named_in

    def _tie_features(self, value: int) -> None:
        """Tie the number of features of a value that a formula reads: every call of a plan has as many."""
        v = self.values[value]
        if type(v.spec.features) is not int:
            self.values[value] = dataclasses.replace(v, spec=_with_tied_features(v.spec))

    def _named(self, label: str, listed: ListedOp, named: Mapping[str, NamedInput], x: Spec) -> dict[str, int]:
        found: dict[str, int] = {}
        for argument, name in listed.names_in.items():
            given = named[argument]
            value = self.names.read(name)
            if value is None and name in self.call.named:
                value = self._call_input(name, given)
            if value is None and given.optional:
                continue
            if value is None:
                raise ValueError(self.names.missing(label, name, listed))
            if given.axes is not None and given.axes & Axes.FEATURE:
                self._tie_features(value)
            check_named(label, name, given, x, self.values[value].spec, listed.lowered.op.batch_dim())
            if self.values[value].axes is None:
                self.values[value] = dataclasses.replace(self.values[value], axes=given.axes)
            found[argument] = value
        return found

    def _call_input(self, name: str, given: NamedInput) -> int:
        if name not in self.names.inputs:
            spec, needs = self.call.named[name]
            self.names.inputs[name] = self._value(name, spec, given.axes, needs and self.call.grad)
        return self.names.inputs[name]

    def _told(self, label: str, op: FusableOperation, like: str, x: Spec, named: Mapping[str, Spec]) -> Inferred:
        """Outputs of an op, inferred once for all ops that are alike."""
        key = like, x.key, *[(name, spec.key) for name, spec in named.items()]
        if key not in self.told:
            try:
                op.check_inputs(x, dict(named))
                specs = output_specs(op, x, named)
            except (ValueError, TypeError) as error:
                raise type(error)(f"{label}: {error}") from error
            check_outputs(label, op, specs)
            if isinstance(op, RowOp):
                specs = {name: _with_tied_features(spec) for name, spec in specs.items()}
            able = frozenset([name for name, spec in specs.items() if is_differentiable(op, name, spec)])
            self.told[key] = Inferred(specs, able, isinstance(op, RowOp) and is_identity(op, x))
        return self.told[key]

    def _named_out(self, label: str, listed: ListedOp, told: Inferred, output: int, needs: bool) -> tuple[int, ...]:
        """The values that an op names, each bound to its name in the list."""
        op, found = listed.lowered.op, []
        axes = Axes.FULL if isinstance(op, RowOp) else None  # else who reads it says what its sizes are
        for name, own in zip(listed.names_out, op.named_outputs(), strict=True):
            called, same = (f"{op.kind.role}.{own}", None) if own in op.values else (name, output)
            needed = needs and own in told.differentiable
            found.append(self._value(called, told.specs[own], axes, needed, same))
            self.names.bind(label, name, op, found[-1])
        return tuple(found)


def _with_tied_features(spec: Spec) -> Spec:
    return dataclasses.replace(spec, shape=(*spec.shape[:-1], *map(int, spec.shape[-1:])))

"""How a list of ops becomes a graph: one way through it, on which every error in the list or the input is raised."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.alike import Inferred, Kinds, Traits, is_identity
from te_fuser.fuser.graph.checks import (
    check_input,
    check_named,
    check_outputs,
    check_parameters,
    check_some_features,
)
from te_fuser.fuser.graph.gradients import check_gives_gradients, is_differentiable, with_gradients
from te_fuser.fuser.graph.graph import Draw, Graph, Node, Value
from te_fuser.fuser.graph.names import Names
from te_fuser.fuser.graph.sharding import gradient_sums
from te_fuser.ops.base import output_specs
from te_fuser.ops.row_op import RowOp
from te_fuser.params.binding import standing_in

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from te_fuser.fuser.graph.listed import CallSpecs, ListedOp, ParameterSpecs
    from te_fuser.ops.base import FusableOperation, NamedInput, Spec
    from te_fuser.params.binding import Key


class GraphBuilder:
    """Builds the graph of a list for one call signature.

    Args:
        listed: the list as it was given.
        lowered: the list behind its passes.
    """

    def __init__(self, listed: Sequence[ListedOp], lowered: Sequence[ListedOp], call: CallSpecs) -> None:
        self.ops, self.call = lowered, call
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        self.bindings = tuple([b.weak() for b in call.bindings])
        self.parameters: dict[Key, int] = {b.key: k for k, b in enumerate(call.bindings)}
        self.names = Names(listed, lowered, call)
        self.kinds = Kinds()
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
        known = [self.call.parameters[b.key] for b in self.bindings]
        return Graph(
            tuple(self.nodes),
            tuple(self.values),
            self.bindings,
            tuple(p.spec for p in known),
            tuple(self.call.grad and p.requires_grad for p in known),
            tuple(p.stand_in if p.computed else b.get for b, p in zip(self.bindings, known, strict=True)),
            named_inputs,
            current,
            outputs,
            {b.key: p.stand_in for b, p in zip(self.bindings, known, strict=True) if p.computed},
            sums=gradient_sums(self.ops, self.parameters),
            lies=tuple(p.lies for p in known),
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
        traits = self.kinds.of(label, op, bindings)
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

    def _taken(
        self, label: str, listed: ListedOp, traits: Traits, current: int, known: Mapping[str, ParameterSpecs]
    ) -> tuple[str, dict[str, int]]:
        """The first op that is alike and takes what is alike, checked for all of these; and the named inputs."""
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
        """What a formula reads has so many features in every call of a plan."""
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
        """What an op says of its outputs; once for all that are alike."""
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

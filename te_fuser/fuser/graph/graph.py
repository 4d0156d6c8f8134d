"""The list of ops as a graph: nodes in order, the values between them, named side edges, and what needs a gradient."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from te_fuser.dtypes import FLOATING
from te_fuser.fuser.graph.checks import check_dtype, plain
from te_fuser.fuser.graph.refs import AS_MADE, RECOMPUTED, VALUE, Form, Ref, parameter_ref
from te_fuser.ops.base import Spec
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.distributed.dtensor import Lies
    from te_fuser.distributed.group import Group
    from te_fuser.distributed.shard import Share
    from te_fuser.formula.expr import Axes
    from te_fuser.fuser.graph.builder import Traits
    from te_fuser.ops.base import FusableOperation, Gradient, Place
    from te_fuser.params.binding import Binding, StandIns


@record()
class Value:
    """A tensor on an edge."""

    index: int
    name: str
    spec: Spec
    axes: Axes | None
    needs_grad: bool
    alias_of: int | None = None  # the value that it is under another name, maybe in another form
    gradient: torch.dtype | None = None  # the dtype in which its gradient arrives, if not its own

    @property
    def gradient_dtype(self) -> torch.dtype:
        return self.spec.dtype if self.gradient is None else self.gradient

    @property
    def gradient_spec(self) -> Spec:
        return self.spec if self.gradient is None else dataclasses.replace(self.spec, dtype=self.gradient)


@record()
class Draw:
    """Source of an op's random numbers: the number of its stream, and this rank's share of x (None: all)."""

    stream: int
    share: Share | None


@record()
class Node:
    """One elementary op in its place."""

    index: int
    op: FusableOperation
    label: str  # for messages: "op 3 (GELU '2.gelu')"
    traits: Traits
    parameters: Mapping[str, int]
    input: int
    output: int
    named_in: Mapping[str, int]
    named_out: tuple[int, ...]
    draw: Draw
    casts: Mapping[str, torch.dtype]
    path: str  # in the module tree
    places: tuple[Place, ...]  # in fused operations
    gradients: tuple[Gradient, ...]  # the nodes of an opaque op's backward

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which it gives the gradient of an input of `dtype`."""
        rule = self.traits.gradient_dtype
        return dtype if rule is None else rule(self.op, dtype)


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
    notes: tuple[str, ...] = ()  # lines of passes for the plan

    @functools.cached_property
    def roots(self) -> list[int]:
        """Value -> the value that it is under another name, or itself."""
        found: list[int] = []
        for v in self.values:  # an alias comes after what it is one of
            found.append(v.index if v.alias_of is None else found[v.alias_of])
        return found

    @functools.cached_property
    def _refs(self) -> list[Ref]:
        made = [self.values[root].spec.dtype for root in self.roots]
        return [
            Ref(VALUE, root, AS_MADE if v.spec.dtype == dtype else Form(v.spec.dtype))
            for v, root, dtype in zip(self.values, self.roots, made, strict=True)
        ]

    @functools.cached_property
    def _firsts(self) -> dict[Ref, int]:
        found: dict[Ref, int] = {}
        for value, ref in enumerate(self._refs):
            found.setdefault(ref, value)
        return found

    @functools.cached_property
    def _storages(self) -> list[int]:
        found = list(self.roots)
        for n in self.nodes:  # what a node reads comes before what it makes
            seen = {"input": n.input, **n.named_in}.get(n.op.views)
            for value in (n.output, *n.named_out):
                found[value] = found[self.roots[value] if seen is None else seen]
        return found

    @functools.cached_property
    def views(self) -> dict[Ref, Ref]:
        """The tensors that are views of others, and the first name of that memory."""
        memories = zip(self._refs, self._storages, strict=True)
        return {ref: self._refs[at] for ref, at in memories if ref.form == AS_MADE and at != ref.index}

    @functools.cached_property
    def related(self) -> list[tuple[int, int, int]]:
        """Values by value: its own, the first of the same tensor, the first in the same memory."""
        return [
            (root, self._firsts[ref], self._storages[root] if ref.form == AS_MADE else root)
            for root, ref in zip(self.roots, self._refs, strict=True)
        ]

    @functools.cached_property
    def readers(self) -> list[list[int]]:
        """Nodes that read each value."""
        found: list[list[int]] = [[] for _ in self.values]
        for n in self.nodes:
            for value in {n.input, *n.named_in.values()}:
                found[value].append(n.index)
        return found

    @functools.cached_property
    def makers(self) -> list[int | None]:
        """Node that makes each value; None for inputs of the call."""
        found: list[int | None] = [None] * len(self.values)
        for n in self.nodes:
            for value in (n.output, *n.named_out):
                found[value] = n.index
        return found

    @functools.cached_property
    def results(self) -> frozenset[int]:
        return frozenset([self.output, *self.named_outputs.values()])

    def exact(self) -> Graph:
        return self._seen(Spec.exact)

    def rounded(self) -> Graph:
        """The graph as prices see it: with plain sizes, those of the call rounded up to the grid."""
        return self._seen(Spec.rounded)

    @property
    def is_on_grid(self) -> bool:
        """True where the sizes of the call are as prices see them."""
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

    def ref(self, value: int) -> Ref:
        """The tensor of a value: that of the value that it is, in its own form."""
        return self._refs[value]

    def again(self, value: int) -> Ref:
        """Tensor of a value as backward computes it again."""
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
        """Owner of a tensor's memory where it is kept for backward; empty for one that is never kept."""
        given = ref.kind is VALUE and ref.form.layout == "rows" and self.makers[self.stored(ref).index] is None
        return "input" if given else ref.owner

    def needs_grad(self, value: int) -> bool:
        """True where somebody upstream of this value needs a gradient."""
        return self.values[value].needs_grad

    def leaving(self, start: int, stop: int) -> list[int]:
        """The values made by the nodes start..stop-1 that somebody else reads."""
        made = [v for n in self.nodes[start:stop] for v in (n.output, *n.named_out)]
        return [v for v in made if v in self.results or any(not start <= c < stop for c in self.readers[v])]


def is_differentiable(op: FusableOperation, name: str, spec: Spec) -> bool:
    """True for an output of an op that can have a gradient."""
    declared = isinstance(op, UnfusedOperation) and name in op.non_differentiable
    return spec.dtype.is_floating_point and not declared


def with_gradients(nodes: Sequence[Node], values: Sequence[Value], leaving: set[int]) -> list[Value]:
    """The values with what their readers say of their gradients; those in `leaving` go to the caller.

    A gradient that nobody gives is none. It arrives in the dtype in which its reader gives it, of several the widest,
    where the op that makes the value takes it so; what the caller gets has its gradient in its own dtype.
    """
    able: dict[Hashable, tuple[str, ...]] = {}
    given = {}
    for node in nodes:
        like = node.traits.number, tuple(node.named_in)
        if like not in able:
            able[like] = _able(node)
        given[node.index] = _values(node, able[like])
    readers: dict[int, list[Node]] = {}
    for node in nodes:
        for value in given[node.index]:
            readers.setdefault(value, []).append(node)
    reached = _reached(nodes, values, given, leaving)
    found = [v if v.index in reached else replace(v, needs_grad=False) for v in values]
    makers = {v: node for node in nodes for v in (node.output, *node.named_out) if v not in leaving}
    known: dict[Hashable, torch.dtype] = {}
    for value in readers.keys() & makers.keys():
        own, op = values[value].spec.dtype, makers[value].op
        # The dtypes that it takes beside its own; None: any, as formulas do.
        taken = op.takes_gradients_in if isinstance(op, UnfusedOperation) else None
        what = own, taken, *[node.traits.number for node in readers[value]]
        if what not in known:
            known[what] = _arriving(own, readers[value], taken or ())
        dtype = known[what]
        if dtype != own and (taken is None or dtype in taken):
            found[value] = replace(found[value], gradient=dtype)
    return found


def check_gives_gradients(nodes: Sequence[Node], asked: Mapping[str, int]) -> None:
    """Refuse a named input (name -> value) that a gradient is asked for, and whose readers give none."""
    for name, value in asked.items():
        readers = [node for node in nodes if value in node.named_in.values()]
        if readers and not any(value in _given(node) for node in readers):
            raise TypeError(
                f"{readers[0].label}: {plain(name)!r} requires a gradient, and {readers[0].op.kind.__name__} gives it "
                f"none: give {plain(name)}.detach()"
            )


def _given(node: Node) -> list[int]:
    """The values of which an op gives the gradient, each once."""
    return _values(node, _able(node))


def _able(node: Node) -> tuple[str, ...]:
    """Names of inputs to which an op gives gradients, equal for ops that are alike."""
    names = ("input", *[n for n in node.named_in if node.traits.reads[n].gradient])
    if node.traits.is_row:
        return names
    produced = [name for gradient in node.gradients for name in gradient.produces]
    return tuple([n for n in names if n in produced])


def _values(node: Node, names: Iterable[str]) -> list[int]:
    return list(dict.fromkeys([node.input if n == "input" else node.named_in[n] for n in names]))


def marked_refs(nodes: Iterable[Node]) -> set[Ref]:
    """The parameters whose attributes some op reads."""
    return {parameter_ref(n.parameters[a]) for n in nodes for g in n.gradients for a in g.by_attributes}


def stops_gradients(node: Node) -> bool:
    """True for an op that hands no gradient on to its main input."""
    declared = isinstance(node.op, UnfusedOperation) and "output" in node.op.non_differentiable
    return declared or node.input not in _given(node)


def _reached(
    nodes: Sequence[Node], values: Sequence[Value], given: Mapping[int, list[int]], leaving: set[int]
) -> set[int]:
    """The values to which a gradient comes, from the caller or from an op behind them."""
    found = set(leaving)
    for node in reversed(nodes):
        if [v for v in (node.output, *node.named_out) if v in found and values[v].needs_grad]:
            found.update(given[node.index])
    return found


def _arriving(own: torch.dtype, readers: Iterable[Node], taken: tuple[torch.dtype, ...]) -> torch.dtype:
    """The dtype in which the gradient of a value comes; its op takes those in `taken`, too."""
    found: dict[torch.dtype, None] = {}
    for node in readers:
        dtype = own if node.traits.gradient_dtype is None else node.gradient_dtype(own)
        if dtype != own:
            check_dtype(f"{node.label}: gradient_dtype", dtype)
        found[dtype] = None
    if len(found) == 1 and dtype in taken:
        return dtype
    # A narrow dtype that is none of these, as those of 8 bits, promotes to nothing.
    known = [dtype for dtype in found if dtype in FLOATING.values()]
    return functools.reduce(torch.promote_types, known) if known else own

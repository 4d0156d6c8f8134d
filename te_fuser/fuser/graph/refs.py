"""Names of tensors in plans, before they become slots: a kind, what identifies it within that, and its form.

The row of a ref's kind knows everything else about it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from te_fuser.codegen.description import Layout, padded, sizes_in_blocks
from te_fuser.dtypes import STORED, name_of
from te_fuser.ops.operations import UnfusedOperation

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.ops.base import Spec


class Form(NamedTuple):
    """Dtype and layout in which a tensor is stored.

    Attributes:
        dtype: None: what it is made in.
        layout: "rows"; or "transposed", [features, rows] with zeros behind the rows up to a multiple of 16; or "blocks"
            or "transposed_blocks", in 8 bits with the scales behind them, as `codegen.description.Store` has it.
    """

    dtype: torch.dtype | None = None
    layout: Layout = "rows"

    def of(self, spec: Spec) -> Spec:
        """The spec of a tensor in this form."""
        found = spec if self.dtype is None else replace(spec, dtype=self.dtype)
        if self.layout == "rows":
            return found
        if self.layout == "transposed":
            return replace(found, shape=(spec.features, padded(spec.rows)))
        sizes = sizes_in_blocks(self.layout, spec.rows, spec.features)
        return replace(found, shape=(*spec.shape[:-1], sizes[1]) if self.layout == "blocks" else sizes)


AS_MADE = Form()


def form_named(name: str) -> tuple[str, Form | None]:
    """Tensor that a fusion names, and the form that it wants: "input.float32" is ("input", Form(float32)).

    "input.transposed" is ("input", Form(layout="transposed")), in the dtype that it has.
    """
    plain, _, form = name.rpartition(".")
    if plain and form == "transposed":
        return plain, Form(layout="transposed")
    return (plain, Form(STORED[form])) if plain and form in STORED else (name, None)


@dataclass(frozen=True, eq=False)
class RefKind:
    """Properties that refs of one kind share.

    Attributes:
        name: for people.
        counts: what the index counts: "values", "parameters", "nodes", "stretches"; empty where there is but one.
        owner: whose memory it is where it is kept for backward, in its first form; empty: it is never kept, since
            backward makes it.
        spec: shape, dtype and device; None where only who makes it knows.
        bytes: how many, where there is no spec.
        label: what people call a tensor of this kind; by default by the name that it has in a step.
    """

    name: str
    counts: str
    owner: str
    spec: Callable[[Graph, Ref], Spec | None] = lambda graph, ref: None
    bytes: Callable[[Graph, Ref], int] = lambda graph, ref: 0
    label: Callable[[Graph, Ref], str] | None = None

    def __repr__(self) -> str:
        return self.name


class Ref(NamedTuple):
    """A tensor of a plan.

    Attributes:
        index: which one of what its kind counts.
        form: a value may exist in several; who reads names the one it wants.
        name: which one of several with that index: a statistic by its digest, what an op emits or a fusion saves.
        term: the number of a contribution to a sum, from 1 on; 0: the whole.
    """

    kind: RefKind
    index: int = 0  # type: ignore[assignment] # nobody looks for an item of a ref
    form: Form = AS_MADE
    name: str = ""
    term: int = 0

    @property
    def owner(self) -> str:
        """Owner of its memory where it is kept; empty for one that is never kept."""
        return self.kind.owner if self.form == AS_MADE or not self.kind.owner else "activation"

    @property
    def by_rows(self) -> Ref:
        return self if self.form.layout == "rows" else self._replace(form=self.form._replace(layout="rows"))

    @property
    def transposed(self) -> Ref:
        return self._replace(form=self.form._replace(layout="transposed"))

    @property
    def is_of_a_value(self) -> bool:
        return self.kind.counts == "values"

    def spec(self, graph: Graph) -> Spec | None:
        """Shape, dtype and device; None where only who makes it knows."""
        return self.kind.spec(graph, self)

    def bytes(self, graph: Graph) -> int:
        spec = self.kind.spec(graph, self)
        return self.kind.bytes(graph, self) if spec is None else bytes_of(spec)

    def label(self, graph: Graph) -> str:
        return self.name if self.kind.label is None else self.kind.label(graph, self)


def bytes_of(spec: Spec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


# ------------------------------------------------------------------------------------------------- the kinds


def _spec_of_value(graph: Graph, ref: Ref) -> Spec:
    return ref.form.of(graph.values[ref.index].spec)


def _spec_of_parameter(graph: Graph, ref: Ref) -> Spec:
    return ref.form.of(graph.parameter_specs[ref.index])


def _bytes_of_statistic(graph: Graph, ref: Ref) -> int:
    first = graph.values[graph.nodes[ref.index].input].spec
    return first.rows * (8 if first.dtype == torch.float64 else 4)


def _bytes_of_emission(graph: Graph, ref: Ref) -> int:
    node = graph.nodes[ref.index]
    assert isinstance(node.op, UnfusedOperation)
    return node.op.emitted_bytes(graph.values[node.input].spec).get(ref.name, 0)


_LYING = {"rows": "", "transposed": " transposed", "blocks": " by blocks", "transposed_blocks": " by blocks transposed"}


def _value_label(graph: Graph, ref: Ref) -> str:
    name = graph.values[ref.index].name
    name = name if ref.form.dtype is None else f"{name} in {name_of(ref.form.dtype)}"
    return name + _LYING[ref.form.layout]


def _parameter_gradient_label(graph: Graph, ref: Ref) -> str:
    owner = next(node for node in graph.nodes if ref.index in node.parameters.values())
    return f"gradient of {graph.parameters[ref.index].name} of {owner.label}"


VALUE = RefKind("value", "values", "activation", _spec_of_value, label=_value_label)
RECOMPUTED = RefKind("value again", "values", "", _spec_of_value, label=_value_label)
GRADIENT = RefKind(
    "gradient",
    "values",
    "",
    lambda graph, ref: ref.form.of(graph.values[ref.index].gradient_spec),
    label=lambda graph, ref: f"gradient of {_value_label(graph, ref)}",
)
PARAMETER = RefKind(
    "parameter",
    "parameters",
    "parameter",
    _spec_of_parameter,
    label=lambda graph, ref: ("" if ref.form == AS_MADE else "cast ") + graph.parameters[ref.index].name,
)
PARAMETER_GRADIENT = RefKind(
    "parameter gradient", "parameters", "", _spec_of_parameter, label=_parameter_gradient_label
)
STATISTIC = RefKind("statistic", "stretches", "statistic", bytes=_bytes_of_statistic)
EMITTED = RefKind("emission", "nodes", "activation", bytes=_bytes_of_emission)
SAVED = RefKind("saved", "nodes", "activation", label=lambda graph, ref: ref.name.partition(": ")[2])
NOTES = RefKind("notes", "nodes", "")  # what is no tensor, from an opaque op's forward to its backward
PART = RefKind("part", "nodes", "")  # what a rank has sent of a sum, and by the name "buffer" where that lies
STARTED = RefKind("started", "nodes", "")  # what a step left under way for the one that waits for it
LEFTS = RefKind("left", "", "")  # the parameters whose gradients a call leaves to the engine that trains, to add up
SEEDS = RefKind("seed", "", "statistic", bytes=lambda graph, ref: 16, label=lambda graph, ref: "seed")
# One tensor that enters a program twice: nobody reads the second.
DOUBLED = RefKind("doubled", "inputs", "")

SEED = Ref(SEEDS)
LEFT = Ref(LEFTS)


def parameter_ref(index: int, dtype: torch.dtype | None = None) -> Ref:
    """A parameter, in another dtype where one is given."""
    return Ref(PARAMETER, index) if dtype is None else Ref(PARAMETER, index, Form(dtype))


def gradient_ref(value: int) -> Ref:
    return Ref(GRADIENT, value)


def parameter_gradient_ref(index: int) -> Ref:
    return Ref(PARAMETER_GRADIENT, index)


def own_term_ref(index: int) -> Ref:
    """A rank's own term of the gradient of a parameter, where that is a sum over ranks."""
    return Ref(PARAMETER_GRADIENT, index, name="of this rank")


def statistic_ref(stretch: int, digest: str) -> Ref:
    return Ref(STATISTIC, stretch, name=digest)


def emitted_ref(node: int, name: str) -> Ref:
    """Emission of an opaque op for its backward."""
    return Ref(EMITTED, node, name=name)


def saved_ref(start: int, fusion: str, name: str) -> Ref:
    """Tensor that a joint fusion saves for its own backward."""
    return Ref(SAVED, start, name=f"{fusion}: {name}")

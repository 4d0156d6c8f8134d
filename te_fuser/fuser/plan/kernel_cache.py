"""Kernels of stretches, derived once for all that are equal: in other layers, other models and later plans.

They are kept by formulas, dtypes, feature sizes and readers, with tensors by their numbers within the stretch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from te_fuser.codegen.description import NotOneKernel
from te_fuser.formula.expr import Axes
from te_fuser.fuser.graph.checks import plain
from te_fuser.fuser.graph.refs import VALUE, Ref
from te_fuser.fuser.plan.stretch import Stretch

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.steps.kernel_task import KernelTask

_KEPT = 1024
# The form of a stretch -> what was asked of it -> its kernel, or why there is none.
_derived: dict[Any, dict[Any, KernelTask | NotOneKernel | None]] = {}
_MISSING = object()


class DerivedStretch:
    """A stretch whose kernels are shared with all equal ones; its methods are those of `Stretch`."""

    def __init__(self, graph: Graph, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._graph, self._first_stream = graph, graph.nodes[start].draw.stream
        nodes = graph.nodes[start:stop]
        values = dict.fromkeys(v for n in nodes for v in (n.input, *n.named_in.values(), n.output, *n.named_out))
        self._values = tuple(dict.fromkeys([*values, *map(graph.roots.__getitem__, values)]))
        self._parameters = tuple(dict.fromkeys(p for n in nodes for p in n.parameters.values()))
        # What the index of a ref counts -> the index in the graph by that within the stretch, and the other way.
        self._outward = {"values": self._values, "parameters": self._parameters, "stretches": (start,)}
        self._inward = {kind: {g: k for k, g in enumerate(numbers)} for kind, numbers in self._outward.items()}
        self.exact = Stretch(graph, start, stop)
        digests = [self.exact.env[v].digest for n in nodes for v in (n.output, *n.named_out)]
        form = tuple(digests), self._describe(nodes)
        if form not in _derived and len(_derived) >= _KEPT:
            _derived.clear()
        self._known = _derived.setdefault(form, {})  # kernels of all stretches of the form
        self._made: dict[Any, KernelTask | None | NotOneKernel] = {}  # what was asked of this one before
        self._leaving: dict[tuple[int, int], list[int]] = {}

    def _describe(self, nodes: Sequence[Node]) -> Any:
        """Key of all that the kernels depend on, apart from the formulas."""
        number, parameter, first = self._inward["values"], self._inward["parameters"], self._first_stream
        ops = tuple(
            (
                n.traits.role,
                number[n.input],
                number[n.output],
                tuple(sorted((name, number[v]) for name, v in n.named_in.items())),
                tuple(number[v] for v in n.named_out),
                tuple(sorted((name, parameter[p], n.casts.get(name)) for name, p in n.parameters.items())),
                n.traits.draws and (n.draw.stream - first, n.draw.share),
                n.op.batch_dim(),
            )
            for n in nodes
        )
        specs = [self._graph.parameter_specs[p] for p in self._parameters]
        needs = [self._graph.parameter_needs[p] for p in self._parameters]
        owned = tuple((s.shape, s.dtype, need) for s, need in zip(specs, needs, strict=True))
        return ops, owned, tuple(map(self._describe_value, self._values))

    def _describe_value(self, value: int) -> Any:
        v = self._graph.values[value]
        readers = self._graph.readers[value]
        inside = tuple(c - self.start for c in readers if self.start <= c < self.stop)
        leaves = len(inside) < len(readers) or value in self._graph.results
        producer = self._graph.makers[value]
        made = producer - self.start if producer is not None and self.start <= producer < self.stop else None
        features = v.spec.features if v.axes is None or v.axes & Axes.FEATURE else 1
        root = self._inward["values"][self._graph.roots[value]]
        return features, v.spec.dtype, v.gradient_dtype, v.axes, v.needs_grad, inside, leaves, made, root

    # -------------------------------------------------------------------------------------- the kernels

    def forward(
        self,
        start: int,
        stop: int,
        stores: Iterable[int],
        statistics: Iterable[str],
        transposed: Iterable[int] = (),
        measuring: bool = False,
    ) -> KernelTask | None:
        stores, statistics, transposed = tuple(stores), tuple(statistics), tuple(transposed)
        numbers = self._numbers(stores), statistics, self._numbers(transposed)
        key = ("forward", start - self.start, stop - self.start, *numbers, measuring)
        return self._once(key, lambda: self.exact.forward(start, stop, stores, statistics, transposed, measuring))

    def backward(
        self,
        start: int,
        stop: int,
        readable: frozenset[int],
        forbidden: frozenset[int],
        recompute: Sequence[int] = (),
        silent: frozenset[int] = frozenset(),
        transposed: frozenset[Ref] = frozenset(),
        measuring: bool = False,
    ) -> KernelTask | None:
        """See `Stretch.backward`; NotOneKernel also where it reads a `forbidden` value."""
        made = (v for n in self._graph.nodes[start:stop] for v in (n.output, *n.named_out))
        readable = readable.intersection(map(self._graph.roots.__getitem__, made))  # by storage
        silent = silent & self.exact.gives_statistics
        sets = frozenset(self._numbers(readable)), frozenset([k - self.start for k in silent])
        turned = frozenset(map(self._numbered, transposed))
        key = ("backward", start - self.start, stop - self.start, self._numbers(recompute), *sets, turned, measuring)
        given = readable, recompute, silent, transposed, measuring
        kernel = self._once(key, lambda: self.exact.backward(start, stop, *given))
        read = {r.index for r in kernel.inputs if r.kind is VALUE} if kernel and forbidden else set()
        bad = [plain(self._graph.values[v].name) for v in forbidden if v in read]
        if bad:
            raise NotOneKernel(f"it would read {', '.join(bad)}, which the forward fusion does not give")
        return kernel

    def values_leaving(self, start: int, stop: int) -> list[int]:
        if (start, stop) not in self._leaving:
            self._leaving[start, stop] = self._graph.leaving(start, stop)
        return self._leaving[start, stop]

    # ------------------------------------------------------------------------------------------ sharing

    def _numbers(self, values: Iterable[int]) -> tuple[int, ...]:
        return tuple(self._inward["values"][v] for v in values)

    def _once(self, key: Any, derive: Callable[[], KernelTask | None]) -> KernelTask | None:
        """A kernel of this stretch, derived where no equal one was; NotOneKernel where there is none."""
        if key not in self._made:
            made: Any = self._known.get(key, _MISSING)
            if made is _MISSING:
                try:
                    made = derive()
                    self._known[key] = made and made.moved(self._numbered, -self._first_stream)
                except NotOneKernel as why:
                    made = self._known[key] = why
            elif not isinstance(made, NotOneKernel):
                made = made and made.moved(self._placed, self._first_stream)
            self._made[key] = made
        found = self._made[key]
        if isinstance(found, NotOneKernel):
            raise NotOneKernel(str(found))
        return found

    def _numbered(self, ref: Ref) -> Ref:
        kind, index, form, name, term = ref
        return Ref(kind, self._inward[kind.counts][index], form, name, term)

    def _placed(self, ref: Ref) -> Ref:
        kind, index, form, name, term = ref
        return Ref(kind, self._outward[kind.counts][index], form, name, term)


def forget() -> None:
    """Drop every derived kernel, for tests and timing."""
    _derived.clear()

"""A stretch of row ops as expressions: substituted into one another, cut where a kernel shall begin, differentiated.

All ranges of a maximal stretch are cut out of one canonical set of expressions, so a statistic that one range emits
and another reads has one name.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from te_fuser import dtypes
from te_fuser.codegen.description import NotOneKernel, describe
from te_fuser.formula import expr
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import parameter_axes
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.reductions import before_quantized, substitute
from te_fuser.formula.traversal import topological
from te_fuser.fuser.graph.refs import Ref, gradient_ref, parameter_gradient_ref, parameter_ref, statistic_ref
from te_fuser.fuser.plan.ranges import Gives, Leaf, Range
from te_fuser.fuser.steps.kernel_task import KernelOutput, KernelTask
from te_fuser.ops.autocast import AUTOCAST
from te_fuser.ops.base import outputs_by_name
from te_fuser.ops.row_op import RowOp

if TYPE_CHECKING:
    from te_fuser.distributed.shard import Share
    from te_fuser.formula.random import Shared
    from te_fuser.fuser.graph.graph import Graph, Node


_Raised = tuple[str, int, Ref, Expr]  # the name of a maximum, its features, the number that is raised, and of what
_Wanted = dict[str, "tuple[Expr | None, KernelOutput]"]  # by the name of a leaf: it, and the tensor of its gradient


class Stretch:
    """The row ops start..stop-1 of a graph as expressions over the tensors that enter them."""

    def __init__(self, graph: Graph, start: int, stop: int) -> None:
        self.graph, self.start, self.stop = graph, start, stop
        self.leaves: dict[str, Leaf] = {}
        self.env: dict[int, Expr] = {}
        self.marks: dict[str, int] = {}  # name of a value node -> value
        self.streams: dict[str, int] = {}
        self._drawn: dict[str, Node] = {}  # the name of a stream -> who draws
        self.roles: dict[int, str] = {}
        self._cuts: dict[int, Range] = {}
        self._differentiated: dict[tuple[int, int], tuple[Range, _Wanted, list[Expr]]] = {}
        # statistics have the dtype of the arithmetic
        wide = graph.values[graph.nodes[start].input].spec.dtype == torch.float64
        self._wide = "float64" if wide else "float32"
        self._trace()

    # ---------------------------------------------------------------------------------- building

    def _trace(self) -> None:
        counts = Counter[str]()
        self._enter("x", self.graph.nodes[self.start].input)
        for node in self.graph.nodes[self.start : self.stop]:
            role = node.traits.role
            counts[role] += 1
            role = role if counts[role] == 1 else f"{role}{counts[role]}"
            self.roles[node.index] = role
            self.env |= self._trace_node(node, role)

    def _trace_node(self, node: Node, role: str) -> dict[int, Expr]:
        op = node.op
        assert isinstance(op, RowOp)
        arguments = [self._argument(node, role, name) for name in op.arguments()]
        try:
            made = outputs_by_name(op, op.compute(self.env[node.input], *arguments), "compute()")
            own = {name: expr.lift(y) for name, y in made.items()}
        except (ValueError, TypeError, AttributeError) as error:
            kind = TypeError if isinstance(error, AttributeError) else type(error)
            hint = "; a formula is written with the functions of te_fuser.formula" if "Expr" in str(error) else ""
            raise kind(f"{node.label}: {error}{hint}") from error
        found = {node.output: self._marked(node, f"{role}.output", role, own["output"], node.output)}
        for value, name in zip(node.named_out, op.named_outputs(), strict=True):
            same = found[node.output]
            found[value] = self._marked(node, f"{role}.{name}", role, own[name], value) if name in own else same
        return found

    def _marked(self, node: Node, name: str, role: str, y: Expr, value: int) -> Expr:
        """Expression of one of an op's values, under a name of its own."""
        if node.traits.draws:
            y = self._name_stream(y, role, node)
        features = self.graph.values[value].spec.features
        if y.op != "const" and not y.has_features and features != 1:
            raise ValueError(f"{node.label}: compute() must give a value for every feature, got one per row: {y}")
        if y.has_features and y.width != features:
            says = "infer()" if value == node.output else "named_output()"
            raise ValueError(
                f"{node.label}: compute() gives {y.width} features, {says} says {features}; it need not be defined "
                f"where the formula says it, or gives x.with_features({y.width})"
            )
        # It may be stored and read again, and then it is there for every row and feature.
        marked = expr.value(name, expr.broadcast(y, Axes.FULL, features))
        if marked.op == "value":
            self.marks[name] = value
        return marked

    def _name_stream(self, y: Expr, role: str, node: Node) -> Expr:
        self.streams[role], self._drawn[role] = node.draw.stream, node

        def rename(e: Expr) -> Expr | None:
            if e.op != "keep" or e.attrs[0] != "keep":
                return None
            return expr.make("keep", (), (role, *e.attrs[1:]), e.axes, e.width)

        return substitute([y], rename)[0]

    def _argument(self, node: Node, role: str, name: str) -> Expr | None:
        if name in node.parameters:
            return self._parameter(node, role, name)
        value = node.named_in.get(name)
        if value is not None and value not in self.env:
            self._enter(f"{role}.{name}", value)
        return None if value is None else self.env[value]

    def _parameter(self, node: Node, role: str, name: str) -> Expr:
        index = node.parameters[name]
        found = next((n for n, leaf in self.leaves.items() if leaf.parameter == index), None)
        if found is None:
            found = f"{role}.{name}"
            spec = self.graph.parameter_specs[index]
            axes, width = parameter_axes(spec.shape), math.prod(spec.shape)
            dtype, ref = spec.dtype, parameter_ref(index)
            if name in node.casts and AUTOCAST.of(type(node.op)).runs_in == "lower":  # else it is as well read as it is
                dtype, ref = node.casts[name], parameter_ref(index, node.casts[name])
            self.leaves[found] = Leaf(ref, axes, width, dtypes.name_of(dtype), parameter=index)
        leaf = self.leaves[found]
        return expr.leaf(found, leaf.axes, leaf.width)

    def _enter(self, name: str, value: int) -> None:
        v = self.graph.values[value]
        axes = v.axes if v.axes is not None else Axes.FULL
        width = v.spec.features if axes & Axes.FEATURE else 1
        self.leaves[name] = Leaf(self.graph.ref(value), axes, width, dtypes.name_of(v.spec.dtype), value=value)
        self.env[value] = expr.leaf(name, axes, width)

    # ------------------------------------------------------------------------------------ ranges

    def batch_dim(self, start: int, stop: int) -> int | None:
        """The batch dimension the ops of a range agree on; NotOneKernel when they disagree."""
        found = {d for n in self.graph.nodes[start:stop] if (d := n.op.batch_dim()) is not None}
        if len(found) > 1:
            raise NotOneKernel(f"the ops count samples along different dimensions {sorted(found)}")
        return found.pop() if found else None

    def _cut(self, start: int) -> Range:
        """Expressions of the range that begins at `start`: values made before it become leaves."""
        found = self._cuts[start] = self._cuts.get(start) or self._cut_at(start)
        return replace(found, leaves=dict(found.leaves))

    def _cut_at(self, start: int) -> Range:
        earlier = {name: v for name, v in self.marks.items() if (p := self.graph.makers[v]) is not None and p < start}
        leaves = {**self.leaves, **{name: self._value_leaf(value) for name, value in earlier.items()}}
        nodes = topological(self.env.values())

        def as_leaf(e: Expr) -> Expr | None:
            if e.op == "value" and e.attrs[0] in earlier:
                return expr.make("input", (), e.attrs, e.axes, e.width)
            return None

        cut = substitute(nodes, as_leaf) if earlier else nodes
        pairs = list(zip(nodes, cut, strict=True))
        return Range({id(a): b for a, b in pairs}, {id(b): a.digest for a, b in pairs if _is_statistic(b)}, leaves)

    def _value_leaf(self, value: int) -> Leaf:
        v = self.graph.values[value]
        return Leaf(self.graph.ref(value), Axes.FULL, v.spec.features, dtypes.name_of(v.spec.dtype), value)

    def forward(
        self,
        start: int,
        stop: int,
        stores: Iterable[int],
        statistics: Iterable[str],
        transposed: Iterable[int] = (),
        measuring: bool = False,
    ) -> KernelTask | None:
        """The kernel that makes the given values and statistics (by digest); None when they are all there already.

        `measuring`: the pass before that one, which raises numbers that scales follow from.
        """
        cut = self._cut(start)
        gives = Gives(cut)
        refs = [*((v, self.graph.ref(v)) for v in stores), *((v, self.graph.ref(v).transposed) for v in transposed)]
        for value, ref in refs:
            if ref not in {o.ref for o in gives.outputs}:
                gives.add(*self._given(value, ref, cut.of(self.env[value])))
        for k, digest in enumerate(statistics):
            output = KernelOutput(statistic_ref(self.start, digest), Axes.ROWS, 1, self._wide)
            gives.store(f"statistic{k}", cut.of(self.statistic(digest)), output)
        for node in self.graph.nodes[start:stop]:
            if (slot := self._raised(node, True, measuring)) is not None:
                e, width = cut.of(self.env[node.input]), self.graph.values[node.input].spec.features
                gives.raise_by(f"{self.roles[node.index]}.amax", e, width, slot)
        return self._kernel(start, stop, "fwd", cut, gives)

    def _given(self, value: int, ref: Ref, e: Expr) -> tuple[str, Expr, KernelOutput]:
        """A value as a kernel gives it: the name of the tensor, the expression and what is stored."""
        spec = self.graph.values[value].spec
        name = self._output_name(value) + _suffix(ref)
        return name, e, KernelOutput(ref, Axes.FULL, spec.features, dtypes.name_of(spec.dtype))

    def statistic(self, digest: str) -> Expr:
        return self._made[digest][1]

    def first_made(self, digest: str) -> int:
        """The first op whose output has that expression in it; -1 for none."""
        return self._made[digest][0] if digest in self._made else -1

    @functools.cached_property
    def gives_statistics(self) -> frozenset[int]:
        """The ops that are the first to make something per row that backward may read."""
        return frozenset([node for node, e in self._made.values() if _is_statistic(e)])

    @functools.cached_property
    def _made(self) -> dict[str, tuple[int, Expr]]:
        """Digest -> the first op whose output has that expression in it, and the expression."""
        found: dict[str, tuple[int, Expr]] = {}
        for node in self.graph.nodes[self.start : self.stop]:
            outputs = [self.env[v] for v in (node.output, *node.named_out)]
            found.update([(e.digest, (node.index, e)) for e in topological(outputs, lambda e: e.digest in found)])
        return found

    def backward(
        self,
        start: int,
        stop: int,
        readable: frozenset[int],
        recompute: Sequence[int] = (),
        silent: frozenset[int] = frozenset(),
        transposed: frozenset[Ref] = frozenset(),
        measuring: bool = False,
    ) -> KernelTask | None:
        """The kernel of the range's backward: adjoints of what enters it that needs one, from those of what leaves it.

        Args:
            readable: values (by storage) that exist after forward, apart from what enters the range.
            recompute: values of the range to compute again and store.
            silent: ops whose per-row statistics forward cannot give.
            transposed: what to store transposed: gradients beside their rows, values to compute again in their place.
            measuring: whether it is the pass before that one, which raises numbers that scales follow from.
        """
        if (start, stop) not in self._differentiated:
            self._differentiated[start, stop] = self._differentiate(start, stop)
        cut, wanted, adjoints = self._differentiated[start, stop]
        arriving = self._raised_by(start, stop, wanted, adjoints, measuring)
        if measuring:
            wanted, adjoints, recompute = {}, [], ()
        if not (wanted or recompute or arriving):
            return None
        again = [cut.of(self.env[v]) for v in recompute]
        avoid = {self.graph.roots[v] for v in recompute}
        roots = adjoints + again + [e for *_, e in arriving]
        readable_marks = {n: v for n, v in self.marks.items() if self.graph.roots[v] in readable - avoid}
        by_output = _by_output(roots, cut, readable_marks)
        ways = [self._reduce(way, cut, readable_marks, silent) for way in (by_output, roots) if way]
        reduced, used = min(ways, key=_full_reads) if len(ways) > 1 else ways[0]
        gives = Gives(used)
        for (name, (_, output)), e in zip(wanted.items(), reduced, strict=False):
            gives.add(f"d_{name}", e, output)
            if (turned := output.ref.transposed) in transposed:
                gives.add(f"d_{name}{_suffix(turned)}", e, output._replace(ref=turned))
        for value, e in zip(recompute, reduced[len(wanted) : len(wanted) + len(again)], strict=True):
            ref = self.graph.again(value)
            gives.store(*self._given(value, ref.transposed if ref.transposed in transposed else ref, e))
        for (name, width, slot, _), e in zip(arriving, reduced[len(wanted) + len(again) :], strict=True):
            gives.raise_by(name, e, width, slot)
        return self._kernel(start, stop, "bwd", used, gives)

    def _raised(self, node: Node, forward: bool, measuring: bool) -> Ref | None:
        """The number that a direction of an op raises to a largest magnitude, or the pass before it."""
        op = node.op
        assert isinstance(op, RowOp)
        if measuring:
            name = op.measured_in_forward if forward else op.measured_in_backward
        else:
            name = op.raised_in_forward if forward else op.raised_in_backward
        return parameter_ref(node.parameters[name]) if name in node.parameters else None

    def _raised_by(
        self, start: int, stop: int, wanted: _Wanted, adjoints: list[Expr], measuring: bool
    ) -> list[_Raised]:
        """Numbers that backward raises by gradients of ops, with the expressions."""
        given = {output.ref: e for (_, output), e in zip(wanted.values(), adjoints, strict=True)}
        found = []
        for node in self.graph.nodes[start:stop]:
            slot, e = self._raised(node, False, measuring), given.get(gradient_ref(node.input))
            if slot is not None and e is not None:
                width = self.graph.values[node.input].spec.features
                found.append((f"d_{self.roles[node.index]}.amax", width, slot, before_quantized(e)))
        return found

    def _differentiate(self, start: int, stop: int) -> tuple[Range, _Wanted, list[Expr]]:
        """The range cut out, what its backward gives, and the adjoint of each of these."""
        cut = self._cut(start)
        seeds = self._seeds(start, stop, cut)
        wanted = self._wanted(start, stop, cut) if seeds else {}
        adjoints = differentiate(seeds, [w for w, _ in wanted.values() if w is not None])
        return cut, wanted, [expr.ZERO if w is None else adjoints[w] for w, _ in wanted.values()]

    def _seeds(self, start: int, stop: int, cut: Range) -> dict[Expr, Expr]:
        seeds: dict[Expr, Expr] = {}
        for value in self.graph.leaving(start, stop):
            v = self.graph.values[value]
            if not v.needs_grad:
                continue
            name = f"d_{self._output_name(value)}"
            while name in cut.leaves:
                name += "_"
            dtype = dtypes.name_of(v.gradient_dtype)
            cut.leaves[name] = Leaf(gradient_ref(value), Axes.FULL, v.spec.features, dtype)
            leaf = expr.leaf(name, Axes.FULL, v.spec.features)
            e = cut.of(self.env[value])
            seeds[e] = expr.add(seeds[e], leaf) if e in seeds else leaf
        return seeds

    def _output_name(self, value: int) -> str:
        producer = self.graph.makers[value]
        assert producer is not None
        role, node = self.roles[producer], self.graph.nodes[producer]
        if value == node.output:
            return f"{role}.output"
        name = node.op.named_outputs()[node.named_out.index(value)]
        other = self.graph.ref(value) != self.graph.ref(node.output)
        return f"{role}.{name}" if other else f"{role}.branch"

    def _wanted(self, start: int, stop: int, cut: Range) -> _Wanted:
        """Leaf name -> (leaf, the gradient tensor) for everything that enters the range and needs a gradient.

        Where both ends of a fork enter, they are one leaf: one gets its whole adjoint, the other none, which is 0.
        """
        wanted: _Wanted = {}
        entering: dict[int, None] = {}
        parameters: dict[int, None] = {}
        inside: set[int] = set()
        for node in self.graph.nodes[start:stop]:
            for value in (node.input, *node.named_in.values()):
                if value not in inside:
                    entering[value] = None
            inside |= {node.output, *node.named_out}
            parameters |= dict.fromkeys(node.parameters.values())
        for value in entering:
            v = self.graph.values[value]
            if not v.needs_grad:
                continue
            leaf = cut.of(self.env[value])
            shape = None if leaf.axes & (Axes.OUTER | Axes.BATCH) else v.spec.shape
            dtype, name = dtypes.name_of(v.gradient_dtype), leaf.attrs[0]
            output = KernelOutput(gradient_ref(value), leaf.axes, leaf.width, dtype, shape)
            wanted[name if name not in wanted else f"{name}_{value}"] = (leaf if name not in wanted else None, output)
        for index in parameters:
            if not self.graph.parameter_needs[index]:
                continue
            name = next(n for n, leaf in cut.leaves.items() if leaf.parameter == index)
            info, spec = cut.leaves[name], self.graph.parameter_specs[index]
            leaf = expr.leaf(name, info.axes, info.width)
            ref = parameter_gradient_ref(index)
            wanted[name] = (leaf, KernelOutput(ref, info.axes, info.width, dtypes.name_of(spec.dtype), spec.shape))
        return wanted

    def _reduce(
        self, roots: list[Expr], cut: Range, readable: dict[str, int], silent: frozenset[int]
    ) -> tuple[list[Expr], Range]:
        """Replace what exists already: stored values, and statistics of forward."""
        leaves = dict(cut.leaves)
        statistics: dict[str, str] = {}

        def as_leaf(e: Expr) -> Expr | None:
            if e.op == "value" and e.attrs[0] in readable:
                leaves[e.attrs[0]] = self._value_leaf(readable[e.attrs[0]])
                return expr.make("input", (), e.attrs, e.axes, e.width)
            digest = cut.statistics.get(id(e))
            if digest is None or self.first_made(digest) in silent:
                return None
            name = statistics.setdefault(digest, f"statistic{len(statistics)}")
            leaves[name] = Leaf(statistic_ref(self.start, digest), Axes.ROWS, 1, self._wide)
            return expr.leaf(name, Axes.ROWS)

        return substitute(roots, as_leaf), Range({}, {}, leaves)

    def _kernel(self, start: int, stop: int, direction: str, cut: Range, gives: Gives) -> KernelTask | None:
        if gives.nothing():
            return None
        # What hands its input through (Fork, say) does nothing that the kernel could be named by.
        busy = [n.traits.role for n in self.graph.nodes[start:stop] if self.graph.roots[n.output] == n.output]
        measures = [] if gives.targets or gives.sums or not gives.maxima else ["amax"]
        name = "_".join([*dict.fromkeys(busy), direction, *measures])
        leaves = {n: leaf.tensor() for n, leaf in cut.leaves.items()}
        description = describe(name, gives.targets, gives.sums, leaves, gives.maxima)
        inputs = tuple(cut.leaves[load.name].ref for load in description.loads)
        full = [cut.leaves[load.name].ref for load in description.loads if load.axes == Axes.FULL]
        lead = full[0] if full else self._any_full(start, stop, direction)
        if any(s not in self.streams for s in description.streams):
            raise TypeError(f"{self._drawing()}: compute() draws by keep_mask; define draws(), which says when it does")
        streams = tuple(self.streams[s] for s in description.streams)
        share, shared = self._shared([self._drawn[s] for s in description.streams])
        if shared:
            description = replace(description, shared=tuple(zip(description.streams, shared, strict=True)))
        outputs = (*gives.outputs, *gives.sum_outputs)
        batch_dim, aliases, raised = self.batch_dim(start, stop), tuple(gives.aliases), tuple(gives.raised)
        return KernelTask(description, inputs, outputs, streams, batch_dim, aliases, lead, raised, share)

    def _shared(self, drawing: Sequence[Node]) -> tuple[Share | None, list[Shared]]:
        """Share of this rank in draws, and how ranks share them by op; (None, []): whole."""
        shares = [n.draw.share for n in drawing if n.draw.share is not None]
        if not shares:
            return None, []
        if len(shares) < len(drawing) or len({(s.rows, s.dim, s.columns) for s in shares}) > 1:
            raise NotOneKernel("the ops draw for values that ranks share in different ways")
        each = zip(shares, drawing, [self.graph.values[n.input].spec for n in drawing], strict=True)
        return shares[0], [s.shared(n.op.batch_dim(), len(x.shape)) for s, n, x in each]

    def _drawing(self) -> str:
        """The first op that draws and does not say so."""
        for node in self.graph.nodes[self.start : self.stop]:
            made = topological([self.env[v] for v in (node.output, *node.named_out)])
            if any(e.op == "keep" and e.attrs[0] not in self.streams for e in made):
                return node.label
        raise AssertionError("none draws")

    def _any_full(self, start: int, stop: int, direction: str) -> Ref:
        """A full-size tensor that is at hand, for a kernel that reads none (dropout with p = 1)."""
        if direction == "fwd":
            return self.graph.ref(self.graph.nodes[start].input)
        return gradient_ref(next(v for v in self.graph.leaving(start, stop) if self.graph.needs_grad(v)))


def _suffix(ref: Ref) -> str:
    """Suffix, for its form, of the name of a tensor in a kernel; empty for rows."""
    return "" if ref.form.layout == "rows" else f"_{ref.form.layout}"


def _by_output(roots: list[Expr], cut: Range, readable: Container[str]) -> list[Expr]:
    """`roots` with the sign of x by the output of a function like ReLU, where that can be read; else nothing.

    A product that follows keeps ReLU's output anyway, and x need then not be there at all.
    """
    values = [e for e in cut.mapping.values() if e.op == "value" and e.attrs[0] in readable]
    given = {e.args[0].args[0]: e for e in values if FUNCTIONS[e.args[0].op].tells_sign}

    def read(e: Expr) -> Expr | None:
        slope = e.op == "le" and e.args[0] in given and e.args[1] is expr.ZERO
        return expr.pointwise("le", given[e.args[0]], expr.ZERO) if slope else None

    return substitute(roots, read) if given else []


def _full_reads(reduced: tuple[list[Expr], Range]) -> int:
    """Number of tensors read that have all rows and features."""
    roots, used = reduced
    leaves = {e.attrs[0] for e in topological(roots) if e.op == "input"}
    return sum(used.leaves[name].axes == Axes.FULL for name in leaves)


def _is_statistic(e: Expr) -> bool:
    """True for a number for each row that backward may read in place of the features that it comes from.

    No pick is one: forward picks among unrounded features, and no rounded one need reach the one it took. Whoever asks
    which feature that was must pick among those it reads.
    """
    return bool(e.depth and not e.has_features and e.axes & Axes.OUTER) and not FUNCTIONS[e.op].picks

"""The planner: which steps cover the list, in each direction, and what is kept in between.

Backward first: its cover says which values it reads. Then the forward cover, which must emit them. If a forward
fusion was refused only because backward reads what it does not give, a second round lets forward choose freely and
plans backward around it; the cheaper total wins. Covers are shortest paths over predicted cost.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import networkx as nx
import torch

from te_fuser.codegen.description import KernelDescription, NotOneKernel
from te_fuser.formula.expr import Axes
from te_fuser.fuser import cost as costs
from te_fuser.fuser.derivation import DerivedStretch
from te_fuser.fuser.device import Device
from te_fuser.fuser.graph import Graph, Node
from te_fuser.fuser.plan import (
    AddTask,
    CastTask,
    Choice,
    FusionTask,
    Kept,
    OpForward,
    OpGradient,
    Plan,
    Refusal,
    Step,
)
from te_fuser.fuser.refs import (
    DTYPE_NAMES,
    SEED,
    Ref,
    cast_ref,
    emitted_ref,
    fused_ref,
    gradient_ref,
    parameter_gradient_ref,
    parameter_ref,
    recomputed_ref,
    value_ref,
)
from te_fuser.fuser.stretch import KernelPlan
from te_fuser.fusions import registry
from te_fuser.fusions.match import Cost, Match, MatchedOp
from te_fuser.fusions.registry import Fusion
from te_fuser.ops.base import Gradient, UnfusedOperation, batch_layout

# Seconds that a kept byte is worth, in passes over it at copy speed: balanced computes a value again when that costs
# at most two passes over the bytes it saves. Most values cost one pass for each of their bytes, so the price alone
# would take all or nothing: balanced then keeps again what is dearest for its bytes, up to half of what it had saved.
LAMBDA = {"fast": 0.0, "balanced": 2.0, "lean": 8.0}
_HARD_PRESSED = 64.0  # where a budget leaves no choice
_AT_ANY_PRICE = 4096.0  # and where launches cost more than that
_GIVEN_BACK = 0.5
_SEGMENT_BYTES = 25 * 2**20
_MAX_SUBSETS = 4
_SEED_BYTES = 16
# Explicit math goes over its scratch again for each product of its backward.
_BACKWARD_SCRATCH = 2.0
_SCRATCH_LAUNCHES = 10
# The speed of a product with an epilogue, over one without: a row op that a kernel nearby does anyway is not worth one.
_EPILOGUE = 0.99
_TIE = 0.05e-6  # seconds: shown as nothing
# Seconds: lengths of edges are whole numbers of it, so that equal layers tie exactly and get equal plans.
_TICK = 1e-13
_NO_TENSOR = "its last op makes no tensor of its own"

# Kind of ref -> whose memory it is; what backward makes itself is not kept.
_OWNERS = {
    "value": "activation",
    "emitted": "activation",
    "fused": "activation",
    "cast": "activation",
    "parameter": "parameter",
    "statistic": "statistic",
    "seed": "statistic",
}


@dataclass(frozen=True)
class Options:
    """What a plan depends on beside the graph."""

    device: Device
    kernels: str = "torch"  # "cpp", "cuda" (generated) or "torch" (interpreted)
    memory: str | int = "balanced"  # a name in LAMBDA, or a budget in bytes
    capability: tuple[int, int] | None = None  # of a GPU that is not at hand


@dataclass(frozen=True)
class Edge:
    """A candidate: steps for the ops start..stop-1, and its cost including what it makes kept."""

    start: int
    stop: int
    name: str
    steps: tuple[Step, ...]
    weight: float
    fusion: Fusion | None = None
    recomputes: tuple[int, ...] = ()
    choices: tuple[Choice, ...] = ()

    @property
    def seconds(self) -> float:
        """Predicted time without the price of memory."""
        return sum(s.seconds for s in self.steps)

    @property
    def length(self) -> int:
        """The weight in ticks; a tie goes to the registered fusion, then to the earlier candidate."""
        return max(10 * round(self.weight / (10 * _TICK)) + (0 if self.fusion else 1), 0)


@dataclass
class Limits:
    """What a forward cover already chosen cannot give: values, statistics of ops, emissions of ops."""

    forbidden: set[int] = field(default_factory=set)
    given: set[int] = field(default_factory=set)
    silent: set[int] = field(default_factory=set)


def match_at(graph: Graph, options: Options, start: int, stop: int) -> Match:
    """What a fusion's condition and cost see of the ops start..stop-1."""
    nodes = graph.nodes[start:stop]
    ops = tuple(MatchedOp(n.op, {k: graph.parameters[p] for k, p in n.parameters.items()}) for n in nodes)
    x, y = graph.values[nodes[0].input], graph.values[nodes[-1].output]
    return Match(ops, x.spec, y.spec, options.kernels, y.needs_grad, options.capability)


def find_matches(graph: Graph, options: Options) -> tuple[list[tuple[Fusion, int, int]], list[Refusal]]:
    """Where the fusions in force fit, and where their conditions said no, with the reason."""
    found, refusals = [], []
    ops = [n.op for n in graph.nodes]
    for fusion in registry.active():
        for start in range(len(ops)):
            for stop in fusion.stops(ops, start):
                why = fusion.refusal(match_at(graph, options, start, stop))
                if why is None:
                    found.append((fusion, start, stop))
                else:
                    refusals.append(Refusal(fusion.direction, start, stop, fusion.name, why))
    return found, refusals


class Planner:
    """Plans one graph."""

    def __init__(self, graph: Graph, options: Options) -> None:
        self.graph, self.options = graph, options
        self.nodes = graph.nodes
        self.matches, self._conditions = find_matches(graph, options)
        self.stretches = [DerivedStretch(graph, a, b) for a, b in self._runs()]
        self.hanging_reads = self._hanging_reads()
        self.refusals: list[Refusal] = []  # of the round that is being planned
        self._sizes: dict[Ref, int] = {}  # of what ops and fusions emit
        self._costs: dict[tuple[int, int, int], tuple[Cost, KernelDescription]] = {}
        self._weight = 0.0
        self._demand_unmet = False
        self._held: frozenset[int] = frozenset()  # values that are kept whatever they cost

    # ----------------------------------------------------------------------------------- candidates

    def _runs(self) -> list[tuple[int, int]]:
        groups = itertools.groupby(self.nodes, key=lambda n: n.is_row)
        return [(g[0].index, g[-1].index + 1) for row, nodes in groups if row and (g := list(nodes))]

    def _match(self, start: int, stop: int) -> Match:
        return match_at(self.graph, self.options, start, stop)

    def _refuse(self, direction: str, start: int, stop: int, name: str, reason: str) -> None:
        refusal = Refusal(direction, start, stop, name, reason)
        if refusal not in self.refusals:
            self.refusals.append(refusal)

    def _stretch_of(self, index: int) -> DerivedStretch:
        return next(s for s in self.stretches if s.start <= index < s.stop)

    def _refuse_for_demand(self, fusion: Fusion, start: int, stop: int, reason: str) -> None:
        """A no that another backward plan could turn into a yes."""
        self._demand_unmet = True
        self._refuse(fusion.direction, start, stop, fusion.name, reason)

    def _row_edges(self, derive: Callable[[DerivedStretch, int, int], Edge | None]) -> list[Edge]:
        """The kernels of every sub-range worth one: between the ends of a stretch and of matched fusions; lone ops."""
        points = {p for _, start, stop in self.matches for p in (start, stop)}
        found = []
        for stretch in self.stretches:
            lone = {(i, i + 1) for i in range(stretch.start, stretch.stop)}
            ranges = set(lone)
            if registry.enabled(registry.STRETCH):
                ends = sorted({stretch.start, stretch.stop} | {p for p in points if stretch.start < p < stretch.stop})
                ranges |= set(itertools.combinations(ends, 2))
                # One pass over more ops is never dearer, so lone ops are only for where such a kernel cannot be had.
                ranges -= lone - set(itertools.pairwise(ends)) if self.options.kernels != "torch" else set()
            edges = {(a, b): derive(stretch, a, b) for a, b in sorted(ranges)}
            if None in edges.values():
                edges |= {(a, b): derive(stretch, a, b) for a, b in sorted(lone - set(edges))}
            found += [edge for edge in edges.values() if edge is not None]
        return found

    # ---------------------------------------------------------------------------------------- costs

    def _rows(self, node: Node) -> int:
        return self.graph.values[node.input].spec.rows

    def _kernel_step(self, kernel: KernelPlan, start: int, stop: int) -> Step:
        description = kernel.description
        first = self.nodes[start]
        shape = self.graph.values[first.input].spec.shape
        samples = batch_layout(shape, kernel.batch_dim)[1]
        c = self._kernel_cost(description, self._rows(first), samples)
        names = [load.name for load in description.loads]
        outs = [t.name for t in description.stores] + [t.name for t in description.sums]
        inputs = list(zip(names, kernel.inputs, strict=True))
        if description.streams:
            inputs.append(("seed", SEED))
        outputs = list(zip(outs, (o.ref for o in kernel.outputs), strict=True))
        outputs += [(f"= {_ref_text(ref)}", new) for new, ref in kernel.aliases]
        made = {r for _, r in outputs}
        inputs += [(f"alias {k}", ref) for k, (_, ref) in enumerate(kernel.aliases) if ref not in made]
        if kernel.lead not in {r for _, r in inputs}:
            inputs.append(("shape", kernel.lead))
        empty = not description.stores and not description.sums
        name = "alias" if empty else description.name
        c = Cost(launches=0) if empty else c
        return Step(name, start, stop, tuple(inputs), tuple(outputs), kernel, c, self._seconds(c, first))

    def _kernel_cost(self, description: KernelDescription, rows: int, samples: int) -> Cost:
        key = (id(description), rows, samples)
        if key not in self._costs:
            # The description is kept too, so that its id is not given to another one.
            self._costs[key] = (
                costs.kernel_cost(description, rows, samples, self.options.kernels != "torch"),
                description,
            )
        return self._costs[key][0]

    def _seconds(self, c: Cost, node: Node) -> float:
        dtype = self.graph.values[node.input].spec.dtype
        return self.options.device.seconds(c, DTYPE_NAMES[dtype])

    def _bytes(self, ref: Ref) -> int:
        kind, number = ref[0], ref[-1] if ref[0] == "seed" else ref[1]
        if kind in ("value", "recomputed", "gradient"):
            return costs.bytes_of(self.graph.values[number].spec)
        if kind in ("parameter", "parameter gradient"):
            return costs.bytes_of(self.graph.parameter_specs[number])
        if kind == "cast":
            return costs.bytes_of(replace(self.graph.parameter_specs[number], dtype=ref[2]))
        if kind == "statistic":
            first = self.graph.values[self.nodes[number].input].spec
            return first.rows * (8 if first.dtype == torch.float64 else 4)
        if kind == "term":
            return self._bytes(number)
        return _SEED_BYTES if kind == "seed" else self._sizes.get(ref, 0)

    def _cost(self, inputs: Iterable[tuple[str, Ref]], outputs: Iterable[tuple[str, Ref]], flops: float) -> Cost:
        """One launch that reads and writes these tensors once."""
        read = sum(self._bytes(r) for r in {r for _, r in inputs})
        return Cost(read, sum(self._bytes(r) for r in {r for _, r in outputs}), flops)

    def _kept_bytes(self, refs: Iterable[Ref]) -> int:
        """What keeping these for backward takes, the call's own inputs and parameters apart."""
        return sum(
            self._bytes(r)
            for r in set(refs)
            if r[0] in ("emitted", "fused") or r[0] == "value" and self.graph.producer(r[1]) is not None
        )

    def _kept_price(self, refs: Iterable[Ref]) -> float:
        """Seconds that keeping these is worth."""
        return self._kept_bytes(refs) * self._weight / self.options.device.bandwidth

    # ------------------------------------------------------------------------------------- backward

    def _gradients(self, node: Node) -> list[tuple[Gradient, frozenset[str]]]:
        """The gradient nodes of an opaque op that somebody needs."""
        assert isinstance(node.op, UnfusedOperation)
        if not self.graph.needs_grad(node.output):
            return []
        needed = self._needed(node)
        names = (*node.parameters, *node.named_in)
        found = [(g, frozenset(g.produces) & needed) for g in node.op.gradients(names)]
        return [(g, n) for g, n in found if n]

    def _needed(self, node: Node) -> frozenset[str]:
        needed = {"input"} if self.graph.needs_grad(node.input) else set()
        needed |= {name for name, p in node.parameters.items() if self.graph.parameter_needs[p]}
        given = node.op.named_inputs()
        needed |= {a for a, v in node.named_in.items() if given[a].gradient and self.graph.needs_grad(v)}
        return frozenset(needed)

    def _is_hanging(self, node: Node, gradient: Gradient) -> bool:
        return not any(p == "input" or p in node.named_in for p in gradient.produces)

    def _hanging_reads(self) -> dict[int, bool]:
        """Values (by storage) that opaque gradients read -> whether only hanging nodes read them."""
        found: dict[int, bool] = {}
        for node in self.nodes:
            if node.is_row:
                continue
            for gradient, _ in self._gradients(node):
                for name in gradient.reads:
                    value = {"input": node.input, "output": node.output, **node.named_in}.get(name)
                    if value is not None:
                        root = self.graph.root(value)
                        found[root] = found.get(root, True) and self._is_hanging(node, gradient)
        return found

    def _read_ref(self, node: Node, name: str, recomputed: frozenset[int]) -> Ref | None:
        values = {"input": node.input, "output": node.output, **node.named_in}
        if name in values:
            root = self.graph.root(values[name])
            return recomputed_ref(root) if root in recomputed else value_ref(root)
        if name in node.parameters:
            return self._parameter_ref(node, name)
        if name in getattr(node.op, "emits", ()):
            return emitted_ref(node.index, name)
        return None

    def _parameter_ref(self, node: Node, name: str) -> Ref:
        index = node.parameters[name]
        return cast_ref(index, node.casts[name]) if name in node.casts else parameter_ref(index)

    def _opaque_backward(self, node: Node, limits: Limits) -> Edge | None:
        steps = []
        for gradient, needed in self._gradients(node):
            inputs: list[tuple[str, Ref]] = [("dy", gradient_ref(node.output))]
            for name in gradient.reads:
                ref = self._read_ref(node, name, frozenset())
                if ref is None:
                    continue
                if ref[0] == "value" and ref[1] in limits.forbidden and ref[1] not in limits.given:
                    return None
                if ref[0] == "emitted" and node.index in limits.silent:
                    return None
                inputs.append((name, ref))
            if node.draws:
                inputs.append(("seed", SEED))
            outputs = tuple((f"d_{p}", self._gradient_target(node, p)) for p in gradient.produces if p in needed)
            work = len(outputs) if gradient.work is None else gradient.work
            c = self._opaque_cost(node, inputs, outputs, work, _BACKWARD_SCRATCH)
            whole = len(gradient.produces) > 2
            name = f"{node.role}.{'whole' if whole else '_'.join(gradient.produces)}_gradient"
            task = OpGradient(node, gradient, needed)
            chain = not self._is_hanging(node, gradient)
            steps.append(
                Step(name, node.index, node.index + 1, tuple(inputs), outputs, task, c, self._seconds(c, node), chain)
            )
        # What a weight gradient reads of row ops is priced there, where it may be computed again instead.
        kept = [r for s in steps for r in s.reads() if s.chain or not self._made_by_row_op(r)]
        weight = sum(s.seconds for s in steps) + self._kept_price(kept)
        return Edge(node.index, node.index + 1, node.role, tuple(steps), weight)

    def _made_by_row_op(self, ref: Ref) -> bool:
        producer = self.graph.producer(ref[1]) if ref[0] == "value" else None
        return producer is not None and self.nodes[producer].is_row

    def _opaque_cost(
        self,
        node: Node,
        inputs: Iterable[tuple[str, Ref]],
        outputs: Iterable[tuple[str, Ref]],
        work: float,
        scratch: float,
    ) -> Cost:
        assert isinstance(node.op, UnfusedOperation)
        if node.op.views:
            return Cost(launches=0)
        c = self._cost(inputs, outputs, costs.flops_of(self.graph, [node]) * work)
        extra = node.op.scratch_bytes(self.graph.values[node.input].spec) * scratch
        if not extra:
            return c
        # Operations of their own go over the scratch, after the products and not beside them.
        seconds = self._seconds(c, node) + self._seconds(Cost(extra, extra, launches=_SCRATCH_LAUNCHES), node)
        return replace(c, read=c.read + extra, written=c.written + extra, launches=_SCRATCH_LAUNCHES, seconds=seconds)

    def _emitted(self, node: Node) -> list[tuple[str, Ref]]:
        """What an opaque op emits; its size is known from here on."""
        assert isinstance(node.op, UnfusedOperation)
        sizes = node.op.emitted_bytes(self.graph.values[node.input].spec)
        found = [(name, emitted_ref(node.index, name)) for name in node.op.emits]
        self._sizes |= {ref: sizes.get(name, 0) for name, ref in found}
        return found

    def _gradient_target(self, node: Node, name: str) -> Ref:
        if name == "input":
            return gradient_ref(node.input)
        if name in node.parameters:
            return parameter_gradient_ref(node.parameters[name])
        return gradient_ref(node.named_in[name])

    def _row_backward(self, stretch: DerivedStretch, start: int, stop: int, limits: Limits) -> Edge | None:
        """A range's backward kernel, at its cheapest: what only hanging nodes read is kept, or computed again."""
        readable = frozenset(self.graph.root(v) for v in stretch.values_leaving(stretch.start, stretch.stop))
        readable = (readable | limits.given) - limits.forbidden
        forbidden = frozenset(limits.forbidden - limits.given)
        silent = frozenset(limits.silent)
        wanted = self._recomputable(stretch, start, stop)
        variants: dict[frozenset[int], Edge] = {}
        for again in itertools.chain.from_iterable(itertools.combinations(wanted, k) for k in range(len(wanted) + 1)):
            try:
                kernel = stretch.backward(start, stop, readable, forbidden, again, silent)
            except NotOneKernel as why:
                self._refuse("backward", start, stop, registry.STRETCH, str(why))
                continue
            steps = (self._kernel_step(kernel, start, stop),) if kernel else ()
            kept = [r for s in steps for r in s.reads()] + [value_ref(v) for v in wanted if v not in again]
            weight = sum(s.seconds for s in steps) + self._kept_price(kept)
            name = steps[0].name if steps else "none"
            variants[frozenset(again)] = Edge(start, stop, name, steps, weight, recomputes=again)
        allowed = [edge for again, edge in variants.items() if not again & self._held]
        if not allowed:
            return None
        best = min(allowed, key=lambda edge: edge.weight)
        return replace(best, choices=self._choices(wanted, best, variants))

    def _choices(self, wanted: list[int], best: Edge, variants: Mapping[frozenset[int], Edge]) -> tuple[Choice, ...]:
        found: list[Choice] = []
        for value in wanted:
            other = variants.get(frozenset(best.recomputes) ^ {value})
            if other is not None:
                again = value in best.recomputes
                seconds = best.seconds - other.seconds if again else other.seconds - best.seconds
                name, size = self.graph.values[value].name, self._bytes(value_ref(value))
                found.append(Choice(name, again, size, seconds, value))
        return tuple(found)

    def _recomputable(self, stretch: DerivedStretch, start: int, stop: int) -> list[int]:
        found: list[int] = []
        for value in stretch.values_leaving(start, stop):
            root = self.graph.root(value)
            producer = self.graph.producer(root)
            made_here = producer is not None and start <= producer < stop
            if made_here and self.hanging_reads.get(root) and root not in {self.graph.root(f) for f in found}:
                found.append(root)
        return found[:_MAX_SUBSETS]

    def _fusion_backward(self, fusion: Fusion, start: int, stop: int, limits: Limits) -> Edge | None:
        nodes = self.nodes[start:stop]
        if not self.graph.needs_grad(nodes[-1].output):
            return None
        leaving = [v for n in nodes[:-1] for v in (n.output, *n.named_out) if self._read_outside(v, start, stop)]
        if fusion.has_forward and not self._ends_in_a_tensor(nodes):
            self._refuse(fusion.direction, start, stop, fusion.name, _NO_TENSOR)
            return None
        if leaving or nodes[-1].named_out:
            inner = ", ".join(self.graph.values[v].name for v in (*leaving, *nodes[-1].named_out))
            self._refuse(fusion.direction, start, stop, fusion.name, f"{inner} is also read outside the pattern")
            return None
        needed, outputs = self._fusion_gradients(nodes)
        inputs: list[tuple[str, Ref]] = [("dy", gradient_ref(nodes[-1].output))]
        for name in fusion.reads:
            inputs.append((name, self._fusion_ref(fusion, nodes, name)))
        inputs += self._saved(fusion, start, stop)
        have = {name for name, _ in inputs}
        for k, node in enumerate(nodes):
            # masks and the like are the caller's: backward may read them without saying so
            given = node.op.named_inputs()
            inputs += [
                (f"{k}.{a}", value_ref(self.graph.root(v))) for a, v in node.named_in.items() if not given[a].gradient
            ]
            inputs += [(f"{k}.{p}", self._parameter_ref(node, p)) for p in node.parameters if f"{k}.{p}" not in have]
        if any(n.draws for n in nodes):
            inputs.append(("seed", SEED))
        bad = [r for _, r in inputs if r[0] == "value" and r[1] in limits.forbidden and r[1] not in limits.given]
        if bad:
            self._refuse(fusion.direction, start, stop, fusion.name, "it reads what the forward fusion does not give")
            return None
        match = self._match(start, stop)
        products = sum(len(self._gradients(n)) for n in nodes if not n.is_row)
        c = self._fusion_cost(fusion, match, "backward") or self._cost(
            inputs, outputs, costs.flops_of(self.graph, nodes) * products
        )
        seconds = self._seconds(c, nodes[0])
        task = FusionTask(fusion, "backward", nodes, frozenset(needed))
        step = Step(fusion.name, start, stop, tuple(inputs), tuple(outputs), task, c, seconds)
        return Edge(start, stop, fusion.name, (step,), seconds + self._kept_price(step.reads()), fusion)

    def _saved(self, fusion: Fusion, start: int, stop: int) -> list[tuple[str, Ref]]:
        """What a joint fusion hands to its own backward; its size is known from here on."""
        found = [(name, fused_ref(start, fusion.name, name)) for name in fusion.saves]
        sizes = fusion.saved_bytes(self._match(start, stop)) if fusion.saved_bytes else {}
        self._sizes |= {ref: sizes.get(name, 0) for name, ref in found}
        return found

    def _fusion_cost(self, fusion: Fusion, match: Match, direction: str) -> Cost | None:
        """What the fusion says that it takes; a joint one may say it for each direction."""
        if fusion.cost is None:
            return None
        c = fusion.cost(match)
        return c[direction == "backward"] if isinstance(c, tuple) else c

    def _read_outside(self, value: int, start: int, stop: int) -> bool:
        outside = any(not start <= c < stop for c in self.graph.consumers(value))
        return outside or self.graph.leaves(value)

    def _fusion_gradients(self, nodes: tuple[Node, ...]) -> tuple[set[str], list[tuple[str, Ref]]]:
        needed: set[str] = set()
        outputs: list[tuple[str, Ref]] = []
        if self.graph.needs_grad(nodes[0].input):
            needed.add("input")
            outputs.append(("input", gradient_ref(nodes[0].input)))
        made = {v for n in nodes for v in (n.output, *n.named_out)}
        for k, node in enumerate(nodes):
            for name in self._needed(node) - {"input"}:
                if node.named_in.get(name) in made:
                    continue
                needed.add(f"{k}.{name}")
                outputs.append((f"{k}.{name}", self._gradient_target(node, name)))
        return needed, outputs

    def _fusion_ref(self, fusion: Fusion, nodes: tuple[Node, ...], name: str) -> Ref:
        if name == "input":
            return value_ref(self.graph.root(nodes[0].input))
        if name == "output":
            return value_ref(self.graph.root(nodes[-1].output))
        place, _, what = name.partition(".")
        if place.isdigit() and int(place) < len(nodes):
            ref = self._read_ref(nodes[int(place)], what, frozenset())
            if ref is not None:
                return ref
        raise ValueError(
            f'fusion {fusion.name!r}: {name!r} names nothing in its match; use "input", "output", "k.output", '
            '"k.<parameter>" or "k.<named input>"'
        )

    def backward_cover(self, limits: Limits) -> list[Edge] | None:
        """The cheapest cover of the list's backward, or None when some op has no edge under these limits."""
        edges: list[Edge] = []
        edges += self._row_edges(lambda stretch, a, b: self._row_backward(stretch, a, b, limits))
        for node in self.nodes:
            if not node.is_row:
                edge = self._opaque_backward(node, limits)
                if edge is not None:
                    edges.append(edge)
        for fusion, start, stop in self.matches:
            if fusion.has_backward:
                edge = self._fusion_backward(fusion, start, stop, limits)
                if edge is not None:
                    edges.append(edge)
        return self._shortest("backward", edges)

    # -------------------------------------------------------------------------------------- forward

    def _row_forward(self, stretch: DerivedStretch, start: int, stop: int, demands: set[Ref]) -> Edge | None:
        stores = dict.fromkeys(self.graph.root(v) for v in stretch.values_leaving(start, stop))
        for node in self.nodes[start:stop]:
            if value_ref(self.graph.root(node.output)) in demands:
                stores[self.graph.root(node.output)] = None
        stores = {v: None for v in stores if (p := self.graph.producer(v)) is not None and start <= p < stop}
        digests = [d[2] for d in sorted(r for r in demands if r[0] == "statistic" and r[1] == stretch.start)]
        own = stretch.statistics_of(start, stop, digests)
        try:
            kernel = stretch.forward(start, stop, list(stores), own)
        except NotOneKernel as why:
            self._refuse("forward", start, stop, registry.STRETCH, str(why))
            return None
        steps = (self._kernel_step(kernel, start, stop),) if kernel else ()
        name = steps[0].name if steps else "none"
        return Edge(start, stop, name, steps, sum(s.seconds for s in steps))

    def _opaque_forward(self, node: Node) -> Edge:
        inputs: list[tuple[str, Ref]] = [("input", value_ref(self.graph.root(node.input)))]
        inputs += [(p, self._parameter_ref(node, p)) for p in node.parameters]
        inputs += [(a, value_ref(self.graph.root(v))) for a, v in node.named_in.items()]
        if node.draws:
            inputs.append(("seed", SEED))
        outputs = [("output", value_ref(node.output)), *self._emitted(node)]
        c = self._opaque_cost(node, inputs, outputs, 1.0, 1.0)
        step = Step(
            node.role,
            node.index,
            node.index + 1,
            tuple(inputs),
            tuple(outputs),
            OpForward(node),
            c,
            self._seconds(c, node),
        )
        return Edge(node.index, node.index + 1, node.role, (step,), step.seconds)

    def _fusion_forward(self, fusion: Fusion, start: int, stop: int, demands: set[Ref], joint: bool) -> Edge | None:
        nodes = self.nodes[start:stop]
        inside = {self.graph.root(v) for n in nodes for v in (n.output, *n.named_out)}
        entering = self.graph.root(nodes[0].input)
        last = self.graph.root(nodes[-1].output)
        emitted = {f"{k}.output": self.graph.root(n.output) for k, n in enumerate(nodes)}
        gives = {emitted[name] for name in fusion.emits if name in emitted} | {last, entering}
        if not self._ends_in_a_tensor(nodes):
            self._refuse(fusion.direction, start, stop, fusion.name, _NO_TENSOR)
            return None
        kept = {r[1] for r in demands if r[0] == "value" and r[1] in inside}
        made = [v for n in nodes for v in (n.output, *n.named_out)]
        owed = kept | {self.graph.root(v) for v in made if self._read_outside(v, start, stop)}
        missing = owed - gives
        if missing:
            wants = ", ".join(sorted(self.graph.values[v].name for v in missing))
            reader = "backward" if missing <= kept else "a later op"
            has = ", ".join(("its output", *fusion.emits))
            self._refuse_for_demand(fusion, start, stop, f"{reader} reads {wants}, and it gives only {has}")
            return None
        if not joint and self._statistics_owed(start, stop, demands):
            why = "backward reads per-row statistics or op results that it does not give"
            self._refuse_for_demand(fusion, start, stop, why)
            return None
        inputs: list[tuple[str, Ref]] = [("input", value_ref(entering))]
        for k, node in enumerate(nodes):
            inputs += [(f"{k}.{p}", self._parameter_ref(node, p)) for p in node.parameters]
            named = [(a, self.graph.root(v)) for a, v in node.named_in.items()]
            inputs += [(f"{k}.{a}", value_ref(v)) for a, v in named if v not in inside]
        if any(n.draws for n in nodes):
            inputs.append(("seed", SEED))
        outputs = [("output", value_ref(last))]
        wanted = [name for name in fusion.emits if emitted.get(name) in owed and emitted[name] != last]
        outputs += [(name, value_ref(emitted[name])) for name in wanted]
        if joint:
            outputs += self._saved(fusion, start, stop)
        match = self._match(start, stop)
        c = self._fusion_cost(fusion, match, "forward")
        if c is None:
            efficiency = _EPILOGUE if any(n.is_row for n in nodes) else 1.0
            c = replace(self._cost(inputs, outputs, costs.flops_of(self.graph, nodes)), efficiency=efficiency)
        seconds = self._seconds(c, nodes[0])
        step = Step(
            fusion.name, start, stop, tuple(inputs), tuple(outputs), FusionTask(fusion, "forward", nodes), c, seconds
        )
        return Edge(start, stop, fusion.name, (step,), seconds, fusion)

    def _ends_in_a_tensor(self, nodes: tuple[Node, ...]) -> bool:
        return self.graph.root(nodes[-1].output) in {n.output for n in nodes}

    def _statistics_owed(self, start: int, stop: int, demands: set[Ref]) -> bool:
        for r in demands:
            if r[0] == "emitted" and start <= r[1] < stop:
                return True
            if r[0] == "statistic":
                stretch = next(s for s in self.stretches if s.start == r[1])
                low, high = max(start, stretch.start), min(stop, stretch.stop)
                if low < high and stretch.statistics_of(low, high, [r[2]]):
                    return True
        return False

    def forward_cover(self, demands: set[Ref], backward: list[Edge]) -> list[Edge] | None:
        """The cheapest forward cover that gives what is demanded; joint fusions chosen in backward are forced."""
        joint = [e for e in backward if e.fusion is not None and e.fusion.direction == "joint"]
        edges = self._row_edges(lambda stretch, a, b: self._row_forward(stretch, a, b, demands))
        edges += [self._opaque_forward(n) for n in self.nodes if not n.is_row]
        for fusion, start, stop in self.matches:
            if not fusion.has_forward:
                continue
            forced = any(e.fusion is fusion and (e.start, e.stop) == (start, stop) for e in joint)
            silent = not self.graph.needs_grad(self.nodes[stop - 1].output)
            if fusion.direction == "joint" and not forced and not silent:
                continue
            edge = self._fusion_forward(fusion, start, stop, demands, forced)
            if edge is not None:
                edges.append(edge)
        kept = [e for e in edges if not any(_breaks(e, j) for j in joint)]
        return self._shortest("forward", kept)

    # ----------------------------------------------------------------------------------------- both

    def _shortest(self, direction: str, edges: list[Edge]) -> list[Edge] | None:
        graph = nx.DiGraph()
        graph.add_node(0)
        graph.add_node(len(self.nodes))
        best: dict[tuple[int, int], Edge] = {}
        for edge in edges:
            key = (edge.start, edge.stop)
            if key not in best or edge.length < best[key].length:
                best[key] = edge
        for (start, stop), edge in best.items():
            graph.add_edge(start, stop, weight=edge.length)
        try:
            path = nx.shortest_path(graph, 0, len(self.nodes), weight="weight")
        except nx.NetworkXNoPath:
            return None
        chosen = [best[a, b] for a, b in itertools.pairwise(path)]
        taken = {id(e) for e in chosen}
        losers = [e for e in edges if e.fusion is not None and id(e) not in taken]
        if losers:
            self._explain_losers(direction, losers, chosen, graph)
        return chosen

    def _explain_losers(self, direction: str, losers: list[Edge], chosen: list[Edge], graph: nx.DiGraph) -> None:
        """Say of each what the best cover with it in it would cost more than the chosen one."""
        length = nx.single_source_dijkstra_path_length
        before, after = length(graph, 0), length(graph.reverse(copy=False), len(self.nodes))
        best = before[len(self.nodes)]
        for edge in losers:
            rivals = [c for c in chosen if c.start < edge.stop and edge.start < c.stop]
            names = " + ".join(dict.fromkeys(c.name for c in rivals))
            if edge.start not in before or edge.stop not in after:
                reason = f"no other steps fit around it; {names} is taken"
            else:
                more = (before[edge.start] + edge.length + after[edge.stop] - best) * _TICK
                reason = f"predicted {more * 1e6:.1f} us more than {names}" if more >= _TIE else f"no gain over {names}"
                if self._weight and more >= _TIE and direction == "backward":
                    reason += ", with what is kept for backward weighed in"
            self._refuse(direction, edge.start, edge.stop, edge.name, reason)

    def plan(self) -> Plan:
        """Both plans, for the memory that was asked for."""
        memory = self.options.memory
        if isinstance(memory, int):
            return self._within(memory)
        plan = self._weighed(LAMBDA[memory])
        if memory != "balanced":
            return plan
        saved = sum(c.bytes for c in plan.choices if c.recomputed)
        return self._giving_back(plan, saved * _GIVEN_BACK, alike=True)

    def _within(self, budget: int) -> Plan:
        """The fastest plan whose kept activations fit; the leanest one, with a note, when none does."""
        for weight in (LAMBDA["fast"], LAMBDA["lean"], _HARD_PRESSED, _AT_ANY_PRICE):
            plan = self._weighed(weight)
            room = budget - plan.kept_bytes()
            if room >= 0:
                more = self._giving_back(plan, room, alike=False)
                return more if more.kept_bytes() <= budget else plan
        note = f"no plan keeps within {budget} bytes; this one keeps the least, {plan.kept_bytes()} bytes"
        return replace(plan, notes=(*plan.notes, note))

    def _giving_back(self, plan: Plan, room: float, alike: bool) -> Plan:
        """The plan that keeps, of what `plan` computes again, the dearest for its bytes, as far as there is room.

        Args:
            alike: whether equal values of several layers are all kept or none.
        """
        again = sorted((c for c in plan.choices if c.recomputed), key=lambda c: (-c.dearness, c.bytes, c.value))
        held: set[int] = set()
        for _, group in itertools.groupby(again, key=lambda c: (c.value, c.bytes) if alike else c.root):
            choices = list(group)
            size = sum(c.bytes for c in choices)
            if size <= room:
                room -= size
                held |= {c.root for c in choices}
        return self._weighed(self._weight, frozenset(held)) if held else plan

    def _weighed(self, weight: float, held: frozenset[int] = frozenset()) -> Plan:
        """Both plans, where a kept byte is worth `weight` passes over it, and the values in `held` are kept."""
        self._weight, self._held = weight, held
        self._demand_unmet = False
        first, refusals = self._round(Limits()), self.refusals
        assert first is not None
        best = first
        if self._demand_unmet:
            second = self._second_round()
            if second is not None and self._total(*second) < self._total(*first):
                best, refusals = second, self.refusals
        self.refusals = refusals
        return self._finish(*best)

    def _round(self, limits: Limits) -> tuple[list[Edge], list[Edge]] | None:
        self.refusals = []
        backward = self.backward_cover(limits)
        if backward is None:
            return None
        forward = self.forward_cover(self._demands(self._backward_steps(backward)), backward)
        return None if forward is None else (forward, backward)

    def _second_round(self) -> tuple[list[Edge], list[Edge]] | None:
        self.refusals = []
        free = self.forward_cover(set(), [])
        if free is None:
            return None
        limits = Limits()
        for edge in free:
            if edge.fusion is None:
                continue
            nodes = self.nodes[edge.start : edge.stop]
            inside = {self.graph.root(n.output) for n in nodes}
            last = self.graph.root(nodes[-1].output)
            given = {self.graph.root(nodes[int(e.partition(".")[0])].output) for e in edge.fusion.emits}
            limits.forbidden |= inside - {last} - given
            limits.given |= given | {last}
            limits.silent |= {n.index for n in nodes}
        return self._round(limits)

    def _total(self, forward: list[Edge], backward: list[Edge]) -> int:
        return sum(e.length for e in (*forward, *backward))

    def _demands(self, steps: Iterable[Step]) -> set[Ref]:
        made: set[Ref] = set()
        demanded: set[Ref] = set()
        for step in steps:
            demanded |= {r for r in step.reads() if r not in made}
            made |= set(step.writes())
        return {r for r in demanded if r[0] in ("value", "statistic", "emitted", "fused")}

    def _backward_steps(self, cover: list[Edge]) -> list[Step]:
        """The steps of a backward cover in running order: the chain, and each hanging node as soon as it can run."""
        recomputed = frozenset(v for e in cover for v in e.recomputes)
        order: list[Step] = []
        waiting: list[Step] = []
        made: set[Ref] = set()
        for edge in reversed(cover):
            for step in edge.steps:
                step = self._use_recomputed(step, recomputed)
                if step.chain:
                    order.append(step)
                    made |= set(step.writes())
                else:
                    waiting.append(step)
            ready = [s for s in waiting if all(r in made for r in s.reads() if r[0] == "recomputed")]
            waiting = [s for s in waiting if s not in ready]
            order += ready
        assert not waiting, [s.name for s in waiting]
        return order

    def _use_recomputed(self, step: Step, recomputed: frozenset[int]) -> Step:
        if not isinstance(step.task, OpGradient) or step.chain:
            return step
        inputs = tuple(
            (n, recomputed_ref(r[1]) if r[0] == "value" and r[1] in recomputed else r) for n, r in step.inputs
        )
        return replace(step, inputs=inputs)

    def _summed(self, steps: list[Step]) -> list[Step]:
        """Where several steps contribute to one gradient, rename the contributions and add them up."""
        counts: dict[Ref, int] = {}
        for step in steps:
            for ref in step.writes():
                counts[ref] = counts.get(ref, 0) + 1
        shared = {r for r, n in counts.items() if n > 1}
        if not shared:
            return steps
        seen: dict[Ref, list[Ref]] = {r: [] for r in shared}
        result: list[Step] = []
        for step in steps:
            result.append(_rename_outputs(step, seen))
            for ref in shared & set(step.writes()):
                if len(seen[ref]) == counts[ref]:
                    inputs = tuple((f"term {k}", r) for k, r in enumerate(seen[ref]))
                    size = self._bytes(ref)
                    c = Cost(2 * size * (len(inputs) - 1), size * (len(inputs) - 1), 0.0, len(inputs) - 1)
                    seconds = self._seconds(c, self.nodes[step.start])
                    outputs = (("sum", ref),)
                    result.append(Step("add_gradients", step.start, step.stop, inputs, outputs, AddTask(), c, seconds))
        return result

    def _finish(self, forward: list[Edge], backward: list[Edge]) -> Plan:
        segments = self._segments(forward, backward)
        # Each segment makes its own casts and sums: what comes from several of them autograd adds up.
        forward_steps = _by_segment(self._with_casts, [s for e in forward for s in e.steps], segments)
        backward_steps = _by_segment(self._summed, self._backward_steps(backward), segments[::-1])
        kept = self._kept(backward_steps)
        choices = tuple(c for e in backward for c in e.choices)
        taken = {(s.name, s.start, s.stop) for s in (*forward_steps, *backward_steps)}
        refusals = (*self._conditions, *(r for r in self.refusals if (r.name, r.start, r.stop) not in taken))
        memory = self.options.memory
        return Plan(
            self.graph,
            tuple(forward_steps),
            tuple(backward_steps),
            kept,
            segments,
            self.options.device,
            self.options.kernels,
            memory if isinstance(memory, str) else f"at most {memory} bytes",
            refusals,
            choices,
        )

    def _with_casts(self, steps: list[Step]) -> list[Step]:
        made: set[Ref] = set()
        result: list[Step] = []
        for step in steps:
            for ref in step.reads():
                if ref[0] == "cast" and ref not in made:
                    made.add(ref)
                    source = (("parameter", parameter_ref(ref[1])),)
                    c = self._cost(source, (("cast", ref),), 0.0)
                    task = CastTask(ref[2])
                    seconds = self._seconds(c, self.nodes[step.start])
                    result.append(
                        Step("cast_parameter", step.start, step.stop, source, (("cast", ref),), task, c, seconds)
                    )
            result.append(step)
        return result

    def _kept(self, steps: list[Step]) -> tuple[Kept, ...]:
        found: dict[Ref, Kept] = {}
        made: set[Ref] = set()
        for step in steps:
            for name, ref in step.inputs:
                if ref in found or ref in made:
                    continue
                entry = self._kept_entry(name, ref, step)
                if entry is not None:
                    found[ref] = entry
            made |= set(step.writes())
        return tuple(found.values())

    def _kept_entry(self, name: str, ref: Ref, step: Step) -> Kept | None:
        kind = ref[0]
        if kind not in _OWNERS:
            return None
        owner = "input" if kind == "value" and self.graph.producer(ref[1]) is None else _OWNERS[kind]
        names = {
            "value": lambda: self.graph.values[ref[1]].name,
            "parameter": lambda: self.graph.parameters[ref[1]].name,
            "cast": lambda: f"cast {self.graph.parameters[ref[1]].name}",
            "seed": lambda: "seed",
        }
        text = names[kind]() if kind in names else f"{step.name}: {name}"
        return Kept(ref, text, self._bytes(ref), owner)

    def _segments(self, forward: list[Edge], backward: list[Edge]) -> tuple[tuple[int, int], ...]:
        """Cut beside a product, where both covers end a step, when a segment's parameter gradients pass 25 MB."""
        ends = {e.stop for e in forward} & {e.stop for e in backward} - self._bound(backward)
        cuts, size, counted = [0], 0, set()
        for node, following in itertools.pairwise(self.nodes):
            for p in node.parameters.values():
                if self.graph.parameter_needs[p] and p not in counted:
                    counted.add(p)
                    size += costs.bytes_of(self.graph.parameter_specs[p])
            beside = any(not n.is_row and n.parameters for n in (node, following))
            if size >= _SEGMENT_BYTES and following.index in ends and beside:
                cuts.append(following.index)
                size = 0
        return tuple(itertools.pairwise([*cuts, len(self.nodes)]))

    def _bound(self, backward: list[Edge]) -> set[int]:
        """Where no cut can be: between the step that computes a value again and the product that reads it."""
        found: set[int] = set()
        for edge in backward:
            for value in edge.recomputes:
                last = max(
                    self.graph.consumers(v.index)[-1] for v in self.graph.values if self._stands_for(v.index, value)
                )
                found |= set(range(edge.stop, last + 1))
        return found

    def _stands_for(self, value: int, root: int) -> bool:
        return self.graph.root(value) == root and bool(self.graph.consumers(value))


def _breaks(edge: Edge, joint: Edge) -> bool:
    """Whether a forward edge overlaps a forced joint fusion without being it."""
    overlaps = edge.start < joint.stop and joint.start < edge.stop
    return overlaps and edge.fusion is not joint.fusion


def _by_segment(
    change: Callable[[list[Step]], list[Step]], steps: list[Step], segments: Iterable[tuple[int, int]]
) -> list[Step]:
    return [s for start, stop in segments for s in change([s for s in steps if start <= s.start < stop])]


def _rename_outputs(step: Step, seen: dict[Ref, list[Ref]]) -> Step:
    renames: dict[Ref, Ref] = {}
    outputs = []
    for name, ref in step.outputs:
        if ref in seen:
            renames[ref] = ("term", ref, len(seen[ref]))
            seen[ref].append(renames[ref])
        outputs.append((name, renames.get(ref, ref)))
    if not renames:
        return step
    task = step.task
    if isinstance(task, KernelPlan):
        outs = tuple(replace(o, ref=renames.get(o.ref, o.ref)) for o in task.outputs)
        aliases = tuple((renames.get(a, a), renames.get(b, b)) for a, b in task.aliases)
        task = replace(task, outputs=outs, aliases=aliases)
    return replace(step, outputs=tuple(outputs), task=task)


def _ref_text(ref: Ref) -> str:
    return " ".join(str(part) for part in ref)


__all__ = ["LAMBDA", "Edge", "Limits", "Options", "Planner", "Axes"]

"""The planner's problem: a graph for a device, the fusions that fit in it, who needs and reads what in backward."""

from __future__ import annotations

import bisect
import functools
import itertools
import operator
import weakref
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from te_fuser.dtypes import FLOAT8, text_of
from te_fuser.fuser.graph.refs import (
    AS_MADE,
    GRADIENT,
    PARAMETER,
    VALUE,
    Form,
    Ref,
    emitted_ref,
    form_named,
    gradient_ref,
    parameter_gradient_ref,
    parameter_ref,
    saved_ref,
)
from te_fuser.fuser.plan.kernel_cache import DerivedStretch
from te_fuser.fuser.plan.plan import Refusal
from te_fuser.fuser.plan.sections import sections_of
from te_fuser.fuser.plan.tuned import OFF, ON, Choices, place_of
from te_fuser.fusions import registry
from te_fuser.fusions.match import Match, MatchedOp
from te_fuser.fusions.pattern import among, heads, most_ops
from te_fuser.kernels.quantizers import why_not_transposed
from te_fuser.params.binding import standing_in

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence

    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.plan.device import Device
    from te_fuser.fusions.registry import Fusion
    from te_fuser.ops.base import FusableOperation, Gradient, Place


_MAX_AGAIN = 4  # values that a range is tried with and without


@dataclass(frozen=True)
class Options:
    """Options of a plan: all that it depends on beside the graph."""

    device: Device
    target: str = "torch"  # "cpp", "cuda" (generated) or "torch" (interpreted)
    memory: str | int = "balanced"  # a name in LAMBDA, or a budget in bytes
    capability: tuple[int, int] | None = None  # of a GPU that is not at hand
    tuned: Choices = field(default_factory=dict)  # measured choices, whatever the prices say
    records: bool = False  # whether segments may be PyTorch's functions, which autograd records
    notes: tuple[str, ...] = ()  # what is to be said of every plan made with them
    gathers_again: bool = False  # whether backward gathers again what is kept as this rank's part
    summed_apart: bool = False  # whether an engine may sum gradients among ranks as they come


def match_at(graph: Graph, options: Options, start: int, stop: int) -> Match:
    """Match of the ops start..stop-1, as a fusion's condition and cost see it."""
    nodes = graph.nodes[start:stop]
    ops = []
    for node in nodes:  # with parameters and named inputs by the dtypes in which they are read
        parameters = {name: graph.parameter_tensors[p] for name, p in node.parameters.items()}
        inputs = {name: graph.values[v].spec for name, v in node.named_in.items()}
        own = {name: graph.parameter_specs[p].dtype for name, p in node.parameters.items()}
        read = {**own, **node.casts, **{name: spec.dtype for name, spec in inputs.items()}}
        ops.append(MatchedOp(node.op, parameters, read, inputs, own))
    x, y = graph.values[nodes[0].input], graph.values[nodes[-1].output]
    dy = y.gradient_spec if y.needs_grad else None
    return Match(tuple(ops), x.spec, y.spec, options.target, y.needs_grad, options.capability, dy)


def find_matches(
    graph: Graph, options: Options, match_of: Callable[[int, int], Match] | None = None
) -> tuple[list[tuple[Fusion, int, int]], list[Refusal]]:
    """Matches of the fusions in force, and refusals, with the reason, where their conditions said no."""
    match_of = match_of or functools.partial(match_at, graph, options)
    found, refusals = [], []
    ops, places = [n.op for n in graph.nodes], [n.places for n in graph.nodes]
    forms: dict[Hashable, int] = {}
    runs, alike = _Runs(ops), []
    for n in graph.nodes:  # one number for ops whose places a condition that sees no parameter cannot tell apart
        x, y = graph.values[n.input], graph.values[n.output]
        parameters = [(name, graph.parameter_specs[p].key) for name, p in n.parameters.items()]
        named = [(name, graph.values[v].spec.key) for name, v in n.named_in.items()]
        ends = x.spec.key, y.spec.key, y.gradient, y.needs_grad
        form = n.traits.number, *ends, *n.casts.items(), *parameters, *named
        alike.append(forms.setdefault(form, len(forms)))
    known: dict[Hashable, str | None] = {}
    with standing_in(graph.stand_ins):
        for fusion in registry.active():
            for start, stop in _fits(fusion, ops, places, runs):
                here = fusion.name, *alike[start:stop]
                if here in known:
                    why = known[here]
                else:
                    match = match_of(start, stop)
                    why = fusion.refusal(match)
                    if not any(op.looked for op in match.ops):
                        known[here] = why
                if why is None and options.tuned and options.tuned.get(place_of(fusion, match_of(start, stop))) == OFF:
                    why = "measured slower in its place by tune()"
                if why is None:
                    found.append((fusion, start, stop))
                else:
                    refusals.append(Refusal(fusion.direction, start, stop, fusion.name, why))
    return found, refusals


def _transposed_reads(fusion: Fusion) -> Iterator[tuple[tuple[str, ...], str]]:
    """Pairs (gradients, name): `name` is read transposed for these gradients, for all where ()."""
    if not fusion.has_backward:
        return
    always: tuple[str, ...] = ()
    reads = [(always, name.removesuffix("?")) for name in fusion.reads]
    reads += [(gradient.produces, name) for gradient in fusion.gradients for name in gradient.reads]
    for produces, name in reads:
        if (form := form_named(name)[1]) is not None and form.layout == "transposed":
            yield produces, name


class _Runs:
    """Places in a list of ops at which the same kinds follow each other."""

    def __init__(self, ops: Sequence[FusableOperation]) -> None:
        self._kinds: list[Any] = [op.kind for op in ops]
        self._known: dict[int, dict[Any, list[list[int]]]] = {}

    def of(self, most: int) -> dict[Any, list[list[int]]]:
        """First kind -> places at which runs of `most` kinds begin with it, those of equal runs together."""
        if most not in self._known:
            kinds = [*self._kinds, *[None] * (most - 1)]  # behind the end there is nothing
            found: defaultdict[Any, list[int]] = defaultdict(list)
            for start, run in enumerate(zip(*[kinds[k:] for k in range(most)], strict=False)):
                found[run].append(start)
            known = self._known[most] = dict[Any, list[list[int]]]()
            for run, starts in found.items():
                known.setdefault(run[0], []).append(starts)
        return self._known[most]


# With which ops matches of a fusion begin, and how many they have at most.
_reaches: weakref.WeakKeyDictionary[Fusion, tuple[Any, int | None]] = weakref.WeakKeyDictionary()


def _fits(
    fusion: Fusion, ops: Sequence[FusableOperation], places: Sequence[tuple[Place, ...]], runs: _Runs
) -> list[tuple[int, int]]:
    """Ranges in which a pattern fits; equal runs of kinds are looked at once."""
    found: list[tuple[int, int, int]] = []
    if fusion not in _reaches:
        _reaches[fusion] = heads(fusion.pattern), most_ops(fusion.pattern)
    first, most = _reaches[fusion]
    by_kind = runs.of(most or 1)
    kinds = by_kind if first is None else among(first, by_kind)
    groups = [starts for kind in kinds for starts in by_kind[kind]]
    if most is None:
        groups = [[start] for starts in groups for start in starts]
    for starts in groups:
        counts = [stop - starts[0] for stop in fusion.stops(ops, starts[0], places)]
        found += [(start, k, start + count) for start in starts for k, count in enumerate(counts)]
    return [(start, stop) for start, _, stop in sorted(found)]


class Problem:
    """One graph with what does not change while it is planned.

    `graph` has sizes rounded up to the grid, for all but conditions; those of `asked`, as it was given, may note what
    is asked of them. Kernels end before the ops in `borders`.
    """

    def __init__(self, graph: Graph, options: Options, borders: frozenset[int] = frozenset()) -> None:
        self.graph, self.asked, self.options, self.borders = graph.rounded(), graph, options, borders
        self.nodes = graph.nodes
        self._seen: dict[tuple[int, int], Match] = {}
        self._recomputable: dict[tuple[int, int], tuple[Ref, ...]] = {}
        self.matches, self.conditions = self._within_borders(*find_matches(graph, options, self.match))
        self.preferred = {
            (fusion.name, *fusion.covers("backward" if fusion.has_backward else "forward", start, stop))
            for fusion, start, stop in (self.matches if options.tuned else ())
            if options.tuned.get(place_of(fusion, self.match(start, stop))) == ON
        }
        self.stretches = self._runs()
        self._derived: dict[int, DerivedStretch] = {}
        self.ranges = self._ranges()
        self.hanging_reads = self._hanging_reads()
        self.transposed = self._transposed()
        self.gathered_again = self._gathered_again() if options.gathers_again else frozenset()
        self.sections = sections_of(self)

    def _within_borders(
        self, matches: list[tuple[Fusion, int, int]], refusals: list[Refusal]
    ) -> tuple[list[tuple[Fusion, int, int]], list[Refusal]]:
        """The matches that end where kernels do."""
        if not self.borders:
            return matches, refusals
        within, why = [], "a segment may end in it, so that ranks can sum gradients while others are computed"
        for fusion, start, stop in matches:
            if self.borders.isdisjoint(range(start + 1, stop)):
                within.append((fusion, start, stop))
            else:
                refusals.append(Refusal(fusion.direction, start, stop, fusion.name, why))
        return within, refusals

    def _runs(self) -> list[tuple[int, int]]:
        """Ranges of the stretches: longest runs of row ops between borders."""
        ends = sorted(self.borders)
        groups = itertools.groupby(self.nodes, key=lambda n: (n.traits.is_row, bisect.bisect_right(ends, n.index)))
        return [(g[0].index, g[-1].index + 1) for (row, _), nodes in groups if row and (g := list(nodes))]

    def _ranges(self) -> list[list[tuple[int, int]]]:
        """Ranges worth a kernel, by stretch: between its ends and those of matched fusions; lone ops."""
        parts = [f.covers(d, start, stop) for f, start, stop in self.matches for d in ("forward", "backward")]
        points = sorted({p for part in parts for p in part})
        found = []
        for start, stop in self.stretches:
            lone = {(i, i + 1) for i in range(start, stop)}
            ranges = set(lone)
            if registry.enabled(registry.STRETCH):
                first, last = bisect.bisect_right(points, start), bisect.bisect_left(points, stop)
                ends = [start, *points[first:last], stop]
                ranges |= set(itertools.combinations(ends, 2))
                # One pass over more ops is never dearer, so lone ops are only for where such a kernel cannot be had.
                ranges -= lone - set(itertools.pairwise(ends)) if self.options.target != "torch" else set()
            found.append(sorted(ranges))
        return found

    def stretch_of(self, node: int) -> DerivedStretch:
        """The stretch that a row op lies in; made where kernels are asked of it."""
        start, stop = self.stretches[bisect.bisect_right(self.stretches, node, key=operator.itemgetter(0)) - 1]
        if start not in self._derived:
            self._derived[start] = DerivedStretch(self.graph, start, stop)
        return self._derived[start]

    def match(self, start: int, stop: int) -> Match:
        """Match of the ops start..stop-1, as a fusion's condition and cost see it."""
        if (start, stop) not in self._seen:
            self._seen[start, stop] = match_at(self.asked, self.options, start, stop)
        return self._seen[start, stop]

    @functools.cached_property
    def saving(self) -> dict[Ref, tuple[Fusion, tuple[int, int], str]]:
        """Tensor that a joint fusion saves -> the fusion, its match, and its name for it."""
        found: dict[Ref, tuple[Fusion, tuple[int, int], str]] = {}
        for fusion, start, stop in self.matches:
            first, _ = fusion.covers("forward", start, stop)
            for name in fusion.saves:
                found.setdefault(saved_ref(first, fusion.name, name), (fusion, (start, stop), name))
        return found

    @functools.cached_property
    def last_readers(self) -> dict[Ref, int]:
        return {self.graph.ref(v): n.index for n in self.nodes for v in (n.input, *n.named_in.values())}

    @functools.cached_property
    def forms_read(self) -> dict[int, frozenset[tuple[Form, bool]]]:
        """Value that others are under another name -> their forms, and whether each is read."""
        found: dict[int, set[tuple[Form, bool]]] = {}
        read = self.graph.results.union([v for n in self.nodes for v in (n.input, *n.named_in.values())])
        for v in self.graph.values:
            ref = self.graph.ref(v.index)
            found.setdefault(ref.index, set()).add((ref.form, v.index in read))
        return dict(zip(found, map(frozenset, found.values()), strict=True))

    # ------------------------------------------------------------------------------------ gradients

    def needed(self, node: Node) -> frozenset[str]:
        """Names of an op's gradients that somebody needs: "input", parameters, named inputs."""
        needed = {"input"} if self.graph.needs_grad(node.input) else set()
        needed |= {name for name, p in node.parameters.items() if self.graph.parameter_needs[p]}
        needed |= {a for a, v in node.named_in.items() if node.traits.reads[a].gradient and self.graph.needs_grad(v)}
        return frozenset(needed)

    def gradients(self, node: Node) -> list[tuple[Gradient, frozenset[str]]]:
        """The gradient nodes of an opaque op that somebody needs, and what is needed of each."""
        if not [v for v in (node.output, *node.named_out) if self.graph.values[v].needs_grad]:
            return []
        needed = self.needed(node)
        found = [(g, needed.intersection(g.produces)) for g in node.gradients]
        return [(g, n) for g, n in found if n]

    def is_hanging(self, node: Node, gradient: Gradient) -> bool:
        """True where no other op's gradient depends on this one."""
        return {"input", *node.named_in}.isdisjoint(gradient.produces)

    def _hanging_reads(self) -> dict[int, bool]:
        """Values that opaque gradients read -> whether only hanging nodes read them."""
        found: dict[int, bool] = {}
        for node in self.nodes:
            if node.traits.is_row:
                continue
            for gradient, _ in self.gradients(node):
                for name in gradient.reads:
                    value = {"input": node.input, "output": node.output, **node.named_in}.get(name)
                    if value is not None:
                        first = self.graph.first(value)
                        found[first] = found.get(first, True) and self.is_hanging(node, gradient)
        return found

    def _gathered_again(self) -> frozenset[Ref]:
        """Gathered values that only hanging nodes read; the gathers' inputs then count as read by these."""
        found: set[Ref] = set()
        for node in reversed(self.nodes):
            ref, taken = self.graph.ref(node.output), self.graph.first(node.input)
            only = self.hanging_reads.get(self.graph.first(node.output)) and ref.transposed not in self.transposed
            if not node.traits.is_row and node.op.gathers and only and node.output not in self.graph.results:
                found.add(ref)
                self.hanging_reads[taken] = self.hanging_reads.get(taken, True)
        return frozenset(found)

    def recomputable(self, start: int, stop: int) -> tuple[Ref, ...]:
        """Values of a range of row ops that only hanging nodes read, in the form in which these do."""
        if (start, stop) not in self._recomputable:
            made = {v for n in self.nodes[start:stop] for v in (n.output, *n.named_out)}
            leaving = map(self.graph.first, self.stretch_of(start).values_leaving(start, stop))
            found = dict.fromkeys(v for v in leaving if v in made and self.hanging_reads.get(v))
            self._recomputable[start, stop] = tuple(map(self.read_in_backward, found))[:_MAX_AGAIN]
        return self._recomputable[start, stop]

    def read_in_backward(self, value: int) -> Ref:
        """A value in the form in which hanging nodes read it."""
        ref = self.graph.ref(value)
        return ref.transposed if ref.transposed in self.transposed else ref

    def _transposed(self) -> frozenset[Ref]:
        """The values and gradients that fusions would read transposed in backward.

        A gradient is among them only where one step makes it: of a sum nobody makes another form on its way.
        """
        names = {fusion: tuple(_transposed_reads(fusion)) for fusion, _, _ in self.matches}
        found = set[Ref]()
        for fusion, start, stop in (match for match in self.matches if names[match[0]]):
            nodes = self.nodes[slice(*fusion.covers("backward", start, stop))]
            if not self.graph.needs_grad(nodes[-1].output):
                continue
            needed = {f"{k}.{name}" for k, node in enumerate(nodes) for name in self.needed(node)}
            needed |= {"input"} if "0.input" in needed else set()
            read = [name for produces, name in names[fusion] if not produces or needed.intersection(produces)]
            found.update([self.in_match(fusion, nodes, name) for name in read])
        graph = self.graph
        summed = {v for v in {r.index for r in found} if v in graph.results or len(graph.readers[v]) != 1}
        return frozenset([r for r in found if r.kind is not GRADIENT or r.index not in summed])

    # ----------------------------------------------------------------------------------------- refs

    def read_ref(self, node: Node, name: str) -> Ref | None:
        """Ref of what an op calls `name` when it reads; None for other names."""
        values = {"input": node.input, "output": node.output, **node.named_in}
        values |= zip(node.op.named_outputs(), node.named_out, strict=True)
        if name in values:
            return self.graph.ref(values[name])
        if name in node.parameters:
            return self.parameter_ref(node, name)
        if name in node.op.emits:
            return emitted_ref(node.index, name)
        return None

    def in_match(self, fusion: Fusion, nodes: tuple[Node, ...], name: str) -> Ref:
        """Ref of what a fusion calls `name` (with a form, if any) where it covers these ops."""
        plain, form = form_named(name)
        ref = self._named_in_match(nodes, plain)
        if ref is not None and form is not None:
            ref = self._in_form(ref, form)
        if ref is None:
            raise ValueError(
                f'fusion {fusion.name!r}: {name!r} names nothing in its match; use "input", "output", "k.output", '
                '"k.<parameter>", "k.<named input>" or "k.<named output>", maybe with a form, as in "input.float32" or '
                '"input.transposed", or "k.d_output", "k.d_<named output>" or "dy.transposed" for a gradient'
            )
        return ref

    def read_in_match(self, fusion: Fusion, nodes: tuple[Node, ...]) -> tuple[str, ...]:
        """The names that a fusion's backward reads here, of those with "?" what is there."""
        named = ((name, name.removesuffix("?")) for name in fusion.reads)
        return tuple([n for name, n in named if n == name or self._named_in_match(nodes, n) is not None])

    def _named_in_match(self, nodes: tuple[Node, ...], name: str) -> Ref | None:
        if name == "input":
            return self.graph.ref(nodes[0].input)
        if name == "output":
            return self.graph.ref(nodes[-1].output)
        if name == "dy":
            return gradient_ref(nodes[-1].output)
        place, _, what = name.partition(".")
        if not place.removeprefix("-").isdigit() or not -len(nodes) <= int(place) < len(nodes):
            return None
        node = nodes[int(place)]
        values = zip(("output", *node.op.named_outputs()), (node.output, *node.named_out), strict=True)
        return self.read_ref(node, what) or next((gradient_ref(v) for own, v in values if what == f"d_{own}"), None)

    def inner_gradients(self, fusion: Fusion, nodes: tuple[Node, ...]) -> dict[str, Ref]:
        """The gradients inside that one node of a backward fusion makes for others."""
        names = dict.fromkeys(name for gradient in fusion.gradients for name in gradient.produces)
        found = {name: self._named_in_match(nodes, name) for name in names}
        return {name: ref for name, ref in found.items() if ref is not None and ref.kind is GRADIENT}

    def _in_form(self, ref: Ref, form: Form) -> Ref | None:
        """A value or a parameter in a dtype, a value or a gradient transposed; None of anything else."""
        if form.layout == "transposed":
            return ref.transposed if ref.kind in (VALUE, GRADIENT) else None
        if ref.kind is VALUE:
            made = self.graph.values[ref.index].spec.dtype
            return ref._replace(form=AS_MADE if made == form.dtype else form)
        if ref.kind is PARAMETER:
            made = self.graph.parameter_specs[ref.index].dtype
            return parameter_ref(ref.index, None if made == form.dtype else form.dtype)
        return None

    def why_not_there(self, fusion: Fusion, nodes: tuple[Node, ...], names: Iterable[str], stored: bool) -> str | None:
        """Reason for which a fusion cannot read one of these names, say for want of its form or gradient; else None.

        In forward only what others read, and so is `stored`, is there; backward is given what it asks for.
        """
        for name in (n for n in names if n not in ("dy", *fusion.saves)):
            ref = self.in_match(fusion, nodes, name)
            if ref.kind is GRADIENT and not self.graph.needs_grad(ref.index):
                return f"it reads {name}, and no gradient of {self.graph.values[ref.index].name} comes"
            if ref.form.layout == "transposed" and (why := self._why_not_turned(ref)):
                return f"it reads {name}, and {why}"
            if ref.kind is VALUE and form_named(name)[1] is not None:
                standing = [v.index for v in self.graph.values if self.graph.ref(v.index) == ref.by_rows]
                if not standing:
                    return f"it reads {name}, and {self.graph.values[ref.index].name} is in other forms alone"
                if stored and not any(self.graph.readers[v] or v in self.graph.results for v in standing):
                    return f"it reads {name}, which nobody else reads, so that it is not stored"
        return None

    def _why_not_turned(self, ref: Ref) -> str | None:
        """Reason for which nothing makes a tensor transposed; None where something can."""
        spec = ref.by_rows.spec(self.graph)
        if spec is None or spec.dtype not in FLOAT8.values():
            return f"only 8 bits lie transposed, this is {'' if spec is None else text_of(spec.dtype)}"
        return why_not_transposed(spec.features)

    def emitted(self, fusion: Fusion, nodes: tuple[Node, ...]) -> dict[str, Ref]:
        """Tensors that a fusion can give beside its output, of the ops that its forward covers."""
        there = (name for name in fusion.emits if int(name.partition(".")[0]) < len(nodes))
        return {name: self.in_match(fusion, nodes, name) for name in there}

    def parameter_ref(self, node: Node, name: str) -> Ref:
        """A parameter of an op, in the dtype that it runs in."""
        return parameter_ref(node.parameters[name], node.casts.get(name))

    def gradient_target(self, node: Node, name: str) -> Ref:
        if name == "input":
            return gradient_ref(node.input)
        if name in node.parameters:
            return parameter_gradient_ref(node.parameters[name])
        return gradient_ref(node.named_in[name])

    # --------------------------------------------------------------------------------------- values

    def read_outside(self, value: int, start: int, stop: int) -> bool:
        """True where the caller, or an op outside start..stop-1, reads a value."""
        outside = any(not start <= c < stop for c in self.graph.readers[value])
        return outside or value in self.graph.results

    def priced_elsewhere(self, ref: Ref) -> bool:
        """True where another candidate pays for keeping what hanging nodes read, or makes it again."""
        producer = self.graph.makers[ref.index] if ref.kind is VALUE else None
        return ref in self.gathered_again or producer is not None and self.nodes[producer].traits.is_row

    def ends_in_a_tensor(self, nodes: tuple[Node, ...]) -> bool:
        """True where the last of these ops gives a tensor that one of them makes."""
        return self.graph.roots[nodes[-1].output] in {n.output for n in nodes}

"""From covers to a plan: where segments may end, where they end, and what enters and leaves each."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from te_fuser.dtypes import FLOAT8
from te_fuser.fuser.graph.refs import (
    AS_MADE,
    PARAMETER,
    PARAMETER_GRADIENT,
    SEED,
    VALUE,
    Ref,
    bytes_of,
    gradient_ref,
    parameter_gradient_ref,
    parameter_ref,
)
from te_fuser.fuser.plan.cover_steps import (
    in_running_order,
    kept_by,
    with_forms,
    with_sums,
    with_sums_over_ranks,
    without_idle,
    without_unread,
)
from te_fuser.fuser.plan.exchanges import go_by_copies
from te_fuser.fuser.plan.layouts import held_together
from te_fuser.fuser.plan.plan import Plan, SegmentPlan

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.candidates import Edge, Placed
    from te_fuser.fuser.plan.covers import Covers
    from te_fuser.fuser.plan.plan import Refusal
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.step import Step

SEGMENT_BYTES = 25 * 2**20  # of parameter gradients
_SHORT_END = 1 / 16  # of that: too little for a segment of its own
WORTH_A_NODE = 32  # times what an autograd node takes the host, a segment has to take the device


def finish(prices: Prices, covers: Covers) -> Plan:
    """The plan of these covers."""
    problem = prices.problem
    found = prices.once((finish, *covers.forward, *covers.backward), lambda: _segments(prices, covers))
    memory = problem.options.memory

    def refused() -> list[Refusal]:
        taken = {(s.name, s.start, s.stop) for segment in found for s in (*segment.forward, *segment.backward)}
        return [*problem.conditions, *(r for r in covers.refusals() if (r.name, r.start, r.stop) not in taken)]

    return Plan(
        prices.graph,
        found,
        problem.options.device,
        problem.options.target,
        memory if isinstance(memory, str) else f"at most {memory} bytes",
        choices=tuple(covers.choices),
        refused=refused,
    )


def _segments(prices: Prices, covers: Covers) -> tuple[SegmentPlan, ...]:
    forward = [s for p in covers.forward for e in p.moved(prices) for s in e.steps]
    backward = in_running_order([e for p in covers.backward for e in p.moved(prices)])
    if prices.problem.gathered_again:
        backward = without_idle(backward)
    backward = without_unread(prices, backward)
    found = []
    for part in segments(prices, covers):
        within = [[s for s in steps if part[0] <= s.start < part[1]] for steps in (forward, backward)]
        found.append(_segment(prices, part, within))
    return tuple(found)


def _segment(prices: Prices, part: tuple[int, int], steps: list[list[Step]]) -> SegmentPlan:
    """The segment of a range of ops, with its own casts and sums."""
    graph = prices.graph
    values_in, values_out = _crossing(graph, *part)
    given = {r for s in steps[1] for _, r in s.outputs}
    leaving = [gradient_ref(v) if graph.needs_grad(v) else None for v in values_out]
    # Where steps give the gradient of a value that leaves too, as that is read inside as well: a term of a sum.
    arriving = tuple([r._replace(term=1) if r in given else r for r in leaving])
    forward = with_forms(prices, steps[0], set())
    cast = {r for s in forward for _, r in s.outputs}
    summed = with_sums(prices, steps[1], [r for r in arriving if r is not None and r.term])
    backward = with_forms(prices, with_sums_over_ranks(prices, summed), cast)
    reads, made = {r for s in (*forward, *backward) for _, r in s.inputs}, {r for s in backward for _, r in s.outputs}
    own = {r for s in (*forward, *backward) for r in s.writes()}  # scales, say, which each call makes
    parameters = {r.index for r in reads - own if r.kind is PARAMETER and r.form == AS_MADE}
    parameters |= {r.index for r in made if r.kind is PARAMETER_GRADIENT}
    takes = [*map(graph.ref, values_in), *map(parameter_ref, sorted(parameters)), *([SEED] if SEED in reads else [])]
    kept = kept_by(prices, backward)
    # The gradient of each tensor that enters; None for one that needs none.
    gradients = [gradient_ref(v) if graph.needs_grad(v) else None for v in values_in]
    for ref in [r for r in takes if r.kind is not VALUE]:
        needed = ref.kind is PARAMETER and graph.parameter_needs[ref.index]
        gradients.append(parameter_gradient_ref(ref.index) if needed else None)
    return SegmentPlan(
        *part,
        tuple(forward),
        tuple(backward),
        values_in,
        values_out,
        tuple(sorted(parameters)),
        tuple(takes),
        tuple(map(graph.ref, values_out)),
        arriving,
        tuple([r if r in made or r in arriving else None for r in gradients]),
        kept,
    )


def _crossing(graph: Graph, start: int, stop: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The values that enter the segment start..stop-1 and those that leave it."""
    values_in: dict[int, None] = {}
    values_out: dict[int, None] = {}
    for node in graph.nodes[start:stop]:
        for value in (node.input, *node.named_in.values()):
            producer = graph.makers[value]
            if producer is None or producer < start:
                values_in[value] = None
        for value in (node.output, *node.named_out):
            if value in graph.results or max(graph.readers[value], default=0) >= stop:
                values_out[value] = None
    return tuple(values_in), tuple(values_out)


# --------------------------------------------------------------------------------------------------- segments


def borders(graph: Graph) -> frozenset[int]:
    """The ops before which kernels end although one could go on, so that a segment may end there, too.

    Around products of 8 bits no segment could end, and engines would sum gradients among ranks when all are there. So
    kernels end, once for so many gradients as make a segment, at values that a branch begins with: docs/lab/covers.md.
    """
    if not any(v.gradient in FLOAT8.values() for v in graph.values):
        return frozenset()
    found, size, counted, places = set(), 0, set[int](), _places(graph)
    for node, following in itertools.pairwise(graph.nodes):
        new = {p for p in node.parameters.values() if graph.parameter_needs[p]} - counted
        counted |= new
        size += sum(bytes_of(graph.parameter_specs[p]) for p in new)
        if size >= SEGMENT_BYTES and following.index in places:
            found.add(following.index)
            size = 0
    return frozenset(found)


def _places(graph: Graph) -> set[int]:
    """The ops before which one value alone passes, made by a row op and read by several."""
    readers: dict[int, set[int]] = {}
    for v in graph.values:
        readers.setdefault(graph.roots[v.index], set()).update(graph.readers[v.index])
    leaving = {graph.roots[v.index] for v in graph.values if v.index in graph.results}
    changes = [0] * (len(graph.nodes) + 2)  # of how many values pass
    for root, reading in readers.items():
        last = len(graph.nodes) if root in leaving else max(reading, default=-1)
        first = -1 if (made := graph.makers[root]) is None else made
        changes[first + 1] += 1
        changes[max(last, first) + 1] -= 1
    passing = list(itertools.accumulate(changes))
    found = set()
    for node, following in itertools.pairwise(graph.nodes):
        value = graph.values[node.output]
        real = [k for k in readers.get(value.index, ()) if graph.roots[graph.nodes[k].output] != value.index]
        alone = passing[following.index] == 1 and value.gradient is None and len(real) > 1
        if node.traits.is_row and following.traits.is_row and alone:
            found.add(following.index)
    return found


def segments(prices: Prices, covers: Covers) -> tuple[tuple[int, int], ...]:
    """Ranges (first op, op after the last) of the segments of these covers."""
    what = segments, *covers.forward, *covers.backward
    return prices.once(what, lambda: _cut(prices, covers))


def _cut(prices: Prices, covers: Covers) -> tuple[tuple[int, int], ...]:
    """Cut beside a product, or at a border, where both covers end a step, when parameter gradients pass SEGMENT_BYTES.

    Where ranks exchange what a product gives, the cut is before that, so that in backward products run beside it. An
    end with next to no gradients, or too short to be worth an autograd node, is part of the segment before it.
    """
    problem = prices.problem
    graph, least = prices.graph, WORTH_A_NODE * sum(problem.options.device.host.node)
    taken = [0.0] * (len(problem.nodes) + 2)  # seconds, before each op, of both directions' steps; last, of all steps
    for placed in (*covers.forward, *covers.backward):
        for step in [s for e in placed.edges for s in e.steps]:
            taken[step.start + placed.by + 1] += step.seconds
    taken = [*itertools.accumulate(taken)]
    ends = _ends(covers.forward) & _ends(covers.backward) - _bound(prices, covers)
    ends = _beside_exchanges(problem, ends)
    cuts, size, counted = [0], 0, set()
    for node, following in itertools.zip_longest(problem.nodes, problem.nodes[1:]):
        for p in node.parameters.values():
            if graph.parameter_needs[p] and p not in counted:
                counted.add(p)
                size += bytes_of(graph.parameter_specs[p])
        if following is None:
            break
        if size < SEGMENT_BYTES or following.index not in ends:
            continue
        products = [n for n in (node, following) if n.parameters and not n.traits.is_row]
        beside = products or following.index in problem.borders
        if beside and taken[following.index] - taken[cuts[-1]] >= least:
            cuts.append(following.index)
            size = 0
    short = size < _SHORT_END * SEGMENT_BYTES or taken[-1] - taken[cuts[-1]] < least
    if short and len(cuts) > 1:
        cuts.pop()
    return tuple(itertools.pairwise([*cuts, len(problem.nodes)]))


def _beside_exchanges(problem: Problem, ends: set[int]) -> set[int]:
    """Ends between a product and what exchanges its output and its gradient, and borders; without any, all others.

    None lies between a product and what exchanges the gradient of its input; where exchanges go by copies beside
    products, none lies on either side of an exchange.
    """
    graph = problem.graph
    exchanged = {n.index for n in graph.nodes for g in n.gradients if g.wait}
    if not exchanged:
        return ends
    if all(go_by_copies(problem, graph.nodes[k]) for k in exchanged):
        return {k for k in ends if k not in exchanged and k - 1 not in exchanged}
    products = {n.index for n in graph.nodes if not n.traits.is_row and n.parameters}
    both = {k for k in exchanged if graph.nodes[k].op.op_wait is not None}  # type: ignore[attr-defined]
    found = {k for k in ends & both if k - 1 in products}
    return found | ends & problem.borders if found else {k for k in ends if k - 1 not in exchanged}


def _bound(prices: Prices, covers: Covers) -> set[int]:
    """Ops before which no segment may begin."""
    graph = prices.graph
    found = set(held_together(prices, covers))
    # A gradient in another dtype than its value's would come out of autograd in the value's.
    apart = [v.index for v in graph.values if v.gradient is not None]
    for value in apart:
        found |= set(range((graph.makers[value] or 0) + 1, max(graph.readers[value]) + 1))
    for placed in (*covers.forward, *covers.backward):
        # A fusion that reads a value in another form than its ops do cannot be cut off from what makes that.
        for edge, refs in prices.once(
            (_read_apart, placed.edges), functools.partial(_read_apart, prices.problem, placed)
        ):
            for ref in refs:
                found.update(range((graph.makers[placed.refs[ref].index] or 0) + 1, edge.stop + placed.by))
    for placed in covers.backward:
        by = placed.by
        for edge in placed.edges:
            if edge.whole is not None:
                found.update(range(edge.whole[0] + by + 1, edge.whole[1] + by))
            for ref in edge.recomputes:
                found.update(range(edge.stop + by, prices.problem.last_readers[placed.refs[ref].by_rows] + 1))
    return found


def _ends(ways: Iterable[Placed]) -> set[int]:
    return {e.stop + by for by, edges in [(p.by, p.edges) for p in ways] for e in edges}


def _read_apart(problem: Problem, placed: Placed) -> list[tuple[Edge, set[Ref]]]:
    """The fusions that read values in forms that their ops do not read or make them in."""
    graph, found = problem.graph, []
    for edge in [e for e in placed.edges if e.fusion is not None]:
        read = {r for s in edge.steps for _, r in s.inputs if r.kind is VALUE}
        nodes = problem.nodes[edge.start : edge.stop] if read else ()
        own = [graph.ref(v) for n in nodes for v in (n.input, n.output, *n.named_in.values(), *n.named_out)]
        if others := read.difference(own):
            found.append((edge, others))
    return found

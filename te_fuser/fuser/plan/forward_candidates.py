"""Candidates for forward plans, which must give what backward demands: row kernels, opaque ops, fusions."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable, Mapping, Set
from dataclasses import replace
from typing import TYPE_CHECKING

from te_fuser.codegen.description import NotOneKernel
from te_fuser.fuser.graph.refs import EMITTED, SEED, STATISTIC, Ref, emitted_ref, form_named
from te_fuser.fuser.plan.candidates import NO_TENSOR, Edge, Found, find_rows, fusion_task, saved_by
from te_fuser.fuser.plan.layouts import row_steps
from te_fuser.fuser.plan.parameter_prep import measuring_steps, name_of_rows, why_unmeasured
from te_fuser.fuser.steps.op_tasks import OpTask
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions import registry
from te_fuser.ops.operations import UnfusedOperation

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.candidates import MatchOf
    from te_fuser.fuser.plan.kernel_cache import DerivedStretch
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.sections import Section
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step
    from te_fuser.fusions.registry import Fusion

Named = list[tuple[str, Ref]]


class ForwardCandidates:
    """Candidates for a forward that gives what is demanded; `joint` fusions of backward are forced."""

    def __init__(self, prices: Prices, demands: Set[Ref] = frozenset(), joint: Iterable[MatchOf] = ()) -> None:
        self.prices, self.demands, self.joint = prices, demands, frozenset(joint)
        self.problem, self.graph, self.nodes = prices.problem, prices.graph, prices.problem.nodes

    def edges(self, section: Section) -> Found:
        """Candidates of a section, without those that would break a forced joint fusion."""
        found, forced = Found(section), [(f, w) for f, w in self.joint if section.has(w[0])]
        find_rows(self.problem, found, self._row)
        found.others.extend(self._opaque(n) for n in self.nodes[section.start : section.stop] if not n.traits.is_row)
        # A match for each fusion and the ops that its forward covers: a forced one, else the first.
        matches: dict[tuple[Fusion, int, int], tuple[int, int]] = {}
        for fusion, start, stop in section.matches:
            matches.setdefault((fusion, *fusion.covers("forward", start, stop)), (start, stop))
        matches |= {(fusion, *fusion.covers("forward", *whole)): whole for fusion, whole in forced}
        for (fusion, _, stop), whole in matches.items():
            silent = not self.graph.needs_grad(self.nodes[stop - 1].output)
            if fusion.has_forward and (fusion.direction != "joint" or (fusion, whole) in forced or silent):
                edge = self._fusion(fusion, whole, (fusion, whole) in forced, found)
                found.others.extend([] if edge is None else [edge])
        spared = replace(found, rows=_spared(found.rows, forced), lone=_spared(found.lone, forced))
        return replace(spared, others=_spared([[found.others]], forced)[0][0])

    def forward_of(self, backward: Edge, section: Section) -> Edge | None:
        """The forward of a joint fusion that would run backward so; None where it cannot run."""
        assert backward.fusion is not None and backward.whole is not None
        return self._fusion(backward.fusion, backward.whole, True, Found(section))

    def seen_from(self, section: Section) -> tuple[Hashable, ...]:
        """Demands and forced joint fusions of a section: all that its candidates depend on outside it."""
        refs = section.of_refs(*self._demanded) if self.demands else frozenset()
        return refs, section.of_matches(self.joint) if self.joint else frozenset()

    @functools.cached_property
    def _demanded(self) -> tuple[Mapping[int, list[Ref]], Mapping[int, list[Ref]]]:
        """Demanded refs by index: those whose index counts values, and all others."""
        values: dict[int, list[Ref]] = {}
        others: dict[int, list[Ref]] = {}
        for ref in self.demands:
            (values if ref.kind.counts == "values" else others).setdefault(ref.index, []).append(ref)
        return values, others

    def _row(self, found: Found, stretch: DerivedStretch, start: int, stop: int) -> list[Edge]:
        stores = dict.fromkeys(self.graph.first(v) for v in stretch.values_leaving(start, stop))
        inside = [v for n in self.nodes[start:stop] for v in (n.output, *n.named_out)]
        stores |= dict.fromkeys(self.graph.first(v) for v in inside if self.graph.ref(v) in self.demands)
        made = [v for v in stores if (p := self.graph.makers[v]) is not None and start <= p < stop]
        digests = [d for d in self._statistics.get(stretch.start, ()) if start <= stretch.exact.first_made(d) < stop]
        turned = list(dict.fromkeys(self.graph.first(v) for v in inside if self.graph.ref(v) in self._turned))
        by_rows = [*made, *[v for v in turned if v not in made]]

        def derive(transposed: bool) -> KernelTask | None:
            return stretch.forward(start, stop, *((made, digests, turned) if transposed else (by_rows, digests)))

        try:
            wanted = [self.graph.ref(v).transposed for v in turned]
            steps = row_steps(self.prices, (start, stop), wanted, derive)
            measuring = functools.partial(stretch.forward, start, stop, (), (), measuring=True)
            steps = (*measuring_steps(self.prices, (start, stop), measuring), *steps)
        except NotOneKernel as why:
            found.refuse("forward", start, stop, registry.STRETCH, str(why))
            return []
        return [Edge(start, stop, name_of_rows(steps), steps)]

    @functools.cached_property
    def _turned(self) -> frozenset[Ref]:
        return frozenset([r.by_rows for r in self.demands if r.form.layout != "rows"])

    @functools.cached_property
    def _statistics(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, stretch in sorted((r.name, r.index) for r in self.demands if r.kind is STATISTIC):
            found.setdefault(stretch, []).append(name)
        return found

    def _opaque(self, node: Node) -> Edge:
        step = self.prices.once(("forward", node.index), lambda: self._opaque_step(node))
        return Edge(step.start, step.stop, node.traits.role, step.task.phases(step))

    def _opaque_step(self, node: Node) -> Step:
        inputs: list[tuple[str, Ref]] = [("input", self.graph.ref(node.input))]
        inputs += [(p, self.problem.parameter_ref(node, p)) for p in node.parameters]
        inputs += [(a, self.graph.ref(v)) for a, v in node.named_in.items()]
        inputs += [("seed", SEED)] if node.traits.draws else []
        assert isinstance(node.op, UnfusedOperation)
        outputs = [("output", self.graph.ref(node.output))]
        outputs += [(n, self.graph.ref(v)) for n, v in zip(node.op.named_outputs(), node.named_out, strict=True)]
        outputs += [(n, emitted_ref(node.index, n)) for n in node.op.emits]
        price = Price("of_opaque", (node, inputs, outputs, 1.0, 1.0))
        return self.prices.step(node.traits.role, (node.index, node.index + 1), inputs, outputs, OpTask(node), price)

    # --------------------------------------------------------------------------------------- fusions

    def _fusion(self, fusion: Fusion, whole: tuple[int, int], joint: bool, found: Found) -> Edge | None:
        start, stop = fusion.covers("forward", *whole)
        nodes = self.nodes[start:stop]
        impossible = self._why_impossible(fusion, nodes)
        if impossible is not None:
            found.refuse(fusion.direction, start, stop, fusion.name, impossible)
            return None
        made = [v for n in nodes for v in (n.output, *n.named_out)]
        inside = {self.graph.ref(v) for v in made}
        outside = {self.graph.ref(v) for v in made if self.problem.read_outside(v, start, stop)}
        owed = (self.demands | self._turned) & inside | outside  # of what is demanded transposed, a step makes that
        why = self._why_no_fusion(fusion, nodes, owed, inside, joint)
        if why is not None:
            found.demand_unmet = True
            found.refuse(fusion.direction, start, stop, fusion.name, why)
            return None
        last, emitted = self.graph.ref(nodes[-1].output), self.problem.emitted(fusion, nodes).items()
        outputs = [("output", last), *[(name, ref) for name, ref in emitted if ref in owed and ref != last]]
        outputs += saved_by(fusion, whole) if joint else []
        step = self.prices.once(
            ("forward", fusion, whole, tuple(outputs)),
            lambda: self._fusion_step(fusion, nodes, whole, self._fusion_inputs(fusion, nodes, inside), outputs),
        )
        return Edge(start, stop, fusion.name, (step,), fusion=fusion, whole=whole)

    def _fusion_step(
        self, fusion: Fusion, nodes: tuple[Node, ...], whole: tuple[int, int], inputs: Named, outputs: Named
    ) -> Step:
        match = self.problem.match(*whole)
        price = Price("of_fusion", (fusion, match, nodes, "forward", inputs, outputs))
        task = fusion_task(self.problem, fusion, "forward", nodes, match)
        covers = nodes[0].index, nodes[-1].index + 1
        return self.prices.step(fusion.name, covers, inputs, outputs, task, price)

    def _why_impossible(self, fusion: Fusion, nodes: tuple[Node, ...]) -> str | None:
        """Reason for which no backward plan could make room for the fusion; None where one could."""
        if not self.problem.ends_in_a_tensor(nodes):
            return NO_TENSOR
        unmeasured = why_unmeasured(nodes, forward=True)
        return unmeasured or self.problem.why_not_there(fusion, nodes, _forms(fusion), stored=True)

    def _why_no_fusion(
        self, fusion: Fusion, nodes: tuple[Node, ...], owed: Set[Ref], inside: set[Ref], joint: bool
    ) -> str | None:
        """Reason for which the fusion does not give all that is read of its ops; None where it does."""
        emitted = self.problem.emitted(fusion, nodes)
        missing = owed - {*emitted.values(), self.graph.ref(nodes[-1].output), self.graph.ref(nodes[0].input)}
        if missing:
            wants = ", ".join(sorted(r.label(self.graph) for r in missing))
            reader = "backward" if missing <= self.demands else "a later op"
            has = ", ".join(("its output", *fusion.emits))
            return f"{reader} reads {wants}, and it gives only {has}"
        if not joint and any(self._owes(n) for n in nodes):
            return "backward reads per-row statistics or op results that it does not give"
        return None

    def _fusion_inputs(self, fusion: Fusion, nodes: tuple[Node, ...], inside: set[Ref]) -> list[tuple[str, Ref]]:
        inputs: list[tuple[str, Ref]] = [("input", self.graph.ref(nodes[0].input))]
        inputs += [(name, self.problem.in_match(fusion, nodes, name)) for name in _forms(fusion)]
        for k, node in enumerate(nodes):
            inputs += [(f"{k}.{p}", self.problem.parameter_ref(node, p)) for p in node.parameters]
            named = [(f"{k}.{a}", self.graph.ref(v)) for a, v in node.named_in.items()]
            inputs += [(name, ref) for name, ref in named if ref not in inside]
        return [*inputs, *([("seed", SEED)] if any(n.traits.draws for n in nodes) else [])]

    def _owes(self, node: Node) -> bool:
        if not node.traits.is_row:
            return node.index in self._emitting
        stretch = self.problem.stretch_of(node.index)
        return any(stretch.exact.first_made(name) == node.index for name in self._statistics.get(stretch.start, ()))

    @functools.cached_property
    def _emitting(self) -> set[int]:
        return {r.index for r in self.demands if r.kind is EMITTED}


def _forms(fusion: Fusion) -> list[str]:
    """Names of what a fusion's forward takes in a form of its own choice."""
    return [name for name in fusion.takes if form_named(name)[1] is not None] if fusion.has_forward else []


def _spared(groups: list[list[list[Edge]]], forced: Iterable[MatchOf]) -> list[list[list[Edge]]]:
    """Candidates that overlap no forced joint fusion, and the forced ones themselves."""
    taken = [(fusion, whole, *fusion.covers("forward", *whole)) for fusion, whole in forced]

    def breaks(e: Edge) -> bool:
        return any(e.start < b and a < e.stop and (e.fusion is not f or e.whole != w) for f, w, a, b in taken)

    return [[[e for e in edges if not breaks(e)] for edges in group] for group in groups]

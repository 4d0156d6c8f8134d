"""Candidates for backward plans: row kernels with what they compute again, opaque ops' gradients, fusions."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from te_fuser.codegen.description import NotOneKernel
from te_fuser.dtypes import text_of
from te_fuser.fuser.graph.checks import plain
from te_fuser.fuser.graph.refs import AS_MADE, EMITTED, GRADIENT, RECOMPUTED, SEED, VALUE, Ref, gradient_ref
from te_fuser.fuser.plan.candidates import NO_TENSOR, Edge, Found, Withheld, find_rows, fusion_task, saved_by
from te_fuser.fuser.plan.layouts import given_transposed, in_forward, row_steps, wanted_of, with_turned
from te_fuser.fuser.plan.parameter_prep import measuring_steps, name_of_rows, why_unmeasured
from te_fuser.fuser.steps.op_tasks import OpTask
from te_fuser.fuser.steps.step import Price
from te_fuser.fusions import registry

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Node
    from te_fuser.fuser.plan.kernel_cache import DerivedStretch
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.sections import Section
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Step
    from te_fuser.fusions.match import Match
    from te_fuser.fusions.registry import Fusion
    from te_fuser.ops.base import Gradient

Named = list[tuple[str, Ref]]

_WITHHELD = "it reads what the forward fusion does not give"
# Explicit math goes over its scratch again for each product of its backward.
_BACKWARD_SCRATCH = 2.0


@dataclass(frozen=True)
class _Fit:
    """A fusion where it matches, what its backward covers there, and what its forward saves."""

    fusion: Fusion
    whole: tuple[int, int]
    match: Match
    nodes: tuple[Node, ...]
    saved: Named

    @property
    def start(self) -> int:
        return self.nodes[0].index

    @property
    def stop(self) -> int:
        return self.nodes[-1].index + 1


class BackwardCandidates:
    """Every candidate for the backward of one problem, under the limits that a forward cover sets."""

    def __init__(self, prices: Prices, limits: Withheld) -> None:
        self.prices, self.limits = prices, limits
        self.problem, self.graph, self.nodes = prices.problem, prices.graph, prices.problem.nodes
        self.withheld = limits.forbidden - limits.given

    def edges(self, section: Section) -> Found:
        """Candidates of a section; under these limits an op may have none."""
        found = Found(section)
        find_rows(self.problem, found, self._row)
        made = [self._opaque(n) for n in self.nodes[section.start : section.stop] if not n.traits.is_row]
        made += [self._fusion(f, (a, b), found) for f, a, b in section.matches if f.has_backward]
        found.others.extend(e for e in made if e is not None)
        return found

    def seen_from(self, section: Section) -> tuple[Hashable, ...]:
        """Limits on values and ops of a section: all that its candidates depend on outside it."""
        limits = self.limits
        if not (limits.forbidden or limits.given or limits.silent):
            return ()
        values = section.of_values(limits.forbidden), section.of_values(limits.given)
        found = *values, section.of_nodes(limits.silent)
        return found if any(found) else ()

    def _is_withheld(self, ref: Ref) -> bool:
        return ref.kind is VALUE and ref.index in self.withheld

    # ------------------------------------------------------------------------------------ opaque ops

    def _opaque(self, node: Node) -> Edge | None:
        steps: list[Step] = []
        for gradient, needed in self.problem.gradients(node):
            silent = node.index in self.limits.silent
            reads = [r for _, r in self._gradient_reads(node, gradient)]
            if any(self._is_withheld(r) or silent and r.kind is EMITTED for r in reads):
                return None
            what = ("backward", node.index, gradient)
            step = self.prices.once(what, functools.partial(self._gradient_step, node, gradient, needed))
            steps += step.task.phases(step)
        first, gathered = self._gathered_again((node,))
        steps = [*first, *steps]
        # What a weight gradient reads of row ops is priced there, where it may be computed again instead.
        kept = [r for s in steps for r in s.reads() if s.chain or not self.problem.priced_elsewhere(r)]
        bytes_kept = self.prices.kept_bytes(kept)
        return Edge(node.index, node.index + 1, node.traits.role, tuple(steps), bytes_kept, recomputes=gathered)

    def _gathered_again(self, nodes: tuple[Node, ...]) -> tuple[list[Step], tuple[Ref, ...]]:
        """Steps that gather once more, for some ops, what nobody keeps; and the refs that they give."""
        steps: list[Step] = []
        again = [(n, ref) for n in nodes if (ref := self.graph.ref(n.output)) in self.problem.gathered_again]
        for node, ref in again:
            step = self.prices.once(("again", node.index), functools.partial(self._again_step, node, ref))
            steps += step.task.phases(step)
        return steps, tuple([ref for _, ref in again])

    def _again_step(self, node: Node, output: Ref) -> Step:
        inputs = [("input", self.graph.ref(node.input))]
        outputs = [("output", output._replace(kind=RECOMPUTED))]
        price = Price("of_opaque", (node, inputs, outputs, 1.0, 1.0))
        covers, task = (node.index, node.index + 1), OpTask(node, again=True)
        return self.prices.step(f"{node.traits.role}.again", covers, inputs, outputs, task, price, chain=False)

    def _gradient_reads(self, node: Node, gradient: Gradient) -> Named:
        found = [(name, ref) for name in gradient.reads if (ref := self.problem.read_ref(node, name)) is not None]
        return _themselves(found, gradient) if gradient.by_attributes else found

    def _gradient_step(self, node: Node, gradient: Gradient, needed: frozenset[str]) -> Step:
        reads = self._gradient_reads(node, gradient)
        inputs = [*self._arriving(node), *reads, *([("seed", SEED)] if node.traits.draws else [])]
        outputs = [(f"d_{p}", self.problem.gradient_target(node, p)) for p in gradient.produces if p in needed]
        work = len(outputs) if gradient.work is None else gradient.work
        price = Price("of_opaque", (node, inputs, outputs, work, _BACKWARD_SCRATCH))
        whole = len(gradient.produces) > 2
        name = f"{node.traits.role}.{'whole' if whole else '_'.join(gradient.produces)}_gradient"
        task = OpTask(node, gradient, needed, self._casts(node, outputs))
        hanging = self.problem.is_hanging(node, gradient)
        return self.prices.step(name, (node.index, node.index + 1), inputs, outputs, task, price, chain=not hanging)

    def _arriving(self, node: Node) -> Named:
        names = ("dy", *(f"d_{name}" for name in node.op.named_outputs()))
        values = zip(names, (node.output, *node.named_out), strict=True)
        return [(name, gradient_ref(v)) for name, v in values if self.graph.needs_grad(v)]

    def _casts(self, node: Node, outputs: Named) -> tuple[tuple[str, torch.dtype], ...]:
        """The gradients of values that are wanted in another dtype than the op gives them in."""
        values = [(name, self.graph.values[ref.index]) for name, ref in outputs if ref.kind is GRADIENT]
        return tuple(
            (name, v.gradient_dtype) for name, v in values if node.gradient_dtype(v.spec.dtype) != v.gradient_dtype
        )

    # --------------------------------------------------------------------------------------- row ops

    def _row(self, found: Found, stretch: DerivedStretch, start: int, stop: int) -> list[Edge]:
        """Backward kernels of a range, one for each set of values that it computes again."""
        wanted = self.problem.recomputable(start, stop)
        subsets = itertools.chain.from_iterable(itertools.combinations(wanted, k) for k in range(len(wanted) + 1))
        variants = [self._variant(found, stretch, start, stop, again) for again in subsets]
        return [edge for edge in variants if edge is not None]

    def _variant(
        self, found: Found, stretch: DerivedStretch, start: int, stop: int, again: tuple[Ref, ...]
    ) -> Edge | None:
        """Backward kernel that computes `again` again; other values that it could compute are kept."""
        problem, prices, covers = self.problem, self.prices, (start, stop)
        readable, silent = self._readable(stretch), self.limits.silent
        values, turned = tuple(map(self.graph.value_of, again)), wanted_of(problem, start, stop, again)

        def derive(transposed: bool) -> KernelTask | None:
            wanted = frozenset(turned if transposed else ())
            return stretch.backward(start, stop, readable, self.withheld, values, silent, wanted)

        def measuring() -> KernelTask | None:
            return stretch.backward(start, stop, readable, self.withheld, (), silent, measuring=True)

        try:
            steps = row_steps(prices, covers, turned, derive)
            steps = (*measuring_steps(prices, covers, measuring), *steps)
        except NotOneKernel as why:
            found.refuse("backward", start, stop, registry.STRETCH, str(why))
            return None
        made = {r for s in steps for r in s.writes()}
        left = [r for r in problem.recomputable(*covers) if r not in again]
        kept = prices.kept_bytes([*left, *[r for s in steps for r in s.reads() if r not in made]])
        name, more = name_of_rows(steps), in_forward(prices, stretch, covers, left)
        return Edge(start, stop, name, steps, kept, recomputes=again, in_forward=more)

    def _readable(self, stretch: DerivedStretch) -> frozenset[int]:
        leaving = map(self.graph.ref, stretch.values_leaving(stretch.start, stretch.stop))
        left = {r.index for r in leaving if r.form == AS_MADE}
        return frozenset(left | self.limits.given) - self.limits.forbidden

    # --------------------------------------------------------------------------------------- fusions

    def _fusion(self, fusion: Fusion, whole: tuple[int, int], found: Found) -> Edge | None:
        start, stop = fusion.covers("backward", *whole)
        nodes = self.nodes[start:stop]
        if not self.graph.needs_grad(nodes[-1].output):
            return None
        made: Edge | str | None = self._why_no_fusion(fusion, *whole)
        if made is None:
            fit = _Fit(fusion, whole, self.problem.match(*whole), nodes, saved_by(fusion, whole))
            made = self._fusion_apart(fit) if fusion.gradients else self._fusion_at_once(fit)
        if isinstance(made, str):
            found.refuse(fusion.direction, start, stop, fusion.name, made)
            return None
        return made

    def _fusion_at_once(self, fit: _Fit) -> Edge | str:
        """Candidate of a fusion that is one step, or the reason for which there is none."""
        fusion, nodes = fit.fusion, fit.nodes
        inputs = self._fusion_inputs(fit)
        if any(self._is_withheld(r) for _, r in inputs):
            return _WITHHELD
        what = ("backward", fusion, fit.whole)
        step = self.prices.once(what, functools.partial(self._fusion_step, fit, inputs))
        kept = [*step.reads(), *self._left_for_hanging(nodes)]
        steps = with_turned(self.prices, [step], (fit.start, fit.stop))
        return Edge(fit.start, fit.stop, fusion.name, steps, self.prices.kept_bytes(kept), fusion, fit.whole)

    def _fusion_step(self, fit: _Fit, inputs: Named) -> Step:
        fusion, nodes = fit.fusion, fit.nodes
        needed, outputs = self._fusion_gradients(nodes)
        task = fusion_task(self.problem, fusion, "backward", nodes, fit.match, frozenset(needed))
        outputs += (turned := given_transposed(self.problem, task, outputs))
        task = replace(task, needed=task.needed.union(dict(turned))) if turned else task
        price = Price("of_fusion", (fusion, fit.match, nodes, "backward", inputs, outputs))
        return self.prices.step(fusion.name, (fit.start, fit.stop), inputs, outputs, task, price)

    def _fusion_apart(self, fit: _Fit) -> Edge | str:
        """Candidate of a fusion whose nodes run apart; those of parameters alone hang off the chain."""
        fusion = fit.fusion
        needed, outputs = self._fusion_gradients(fit.nodes)
        inner = self.problem.inner_gradients(fusion, fit.nodes)
        targets = {**dict(outputs), **inner}
        steps: list[Step] = []
        for k, gradient in enumerate(fusion.gradients):
            wanted = needed & set(gradient.produces)
            if not wanted:
                continue
            idle = ", ".join(sorted(set(gradient.produces) - wanted - inner.keys()))
            if idle:
                return f"nobody needs the gradient of {idle}, which it makes with {', '.join(sorted(wanted))}"
            step = self._node_of_fusion(fit, k, targets)
            if step is None:
                return _WITHHELD
            steps.append(step)
        missing = needed - {p for g in fusion.gradients for p in g.produces}
        if missing or not steps:
            return f"it gives no gradient of {', '.join(sorted(missing))}"
        written = {r for s in steps for r in s.writes()}
        unmade = [name for s in steps for name, r in s.inputs if name in inner and r not in written]
        if unmade:
            return f"nobody needs the gradients that it makes {unmade[0]} with"
        if fit.saved and not {r for _, r in fit.saved} & {r for s in steps for r in s.reads()}:
            return f"nobody needs the gradient for which it saves {', '.join(fusion.saves)}"
        again, gathered = self._gathered_again(fit.nodes)
        steps = [*again, *steps]
        # What a hanging node reads of row ops outside is priced there, where it may be computed again instead.
        kept = [r for s in steps for r in s.reads() if s.chain or not self._made_outside(r, fit.start, fit.stop)]
        bytes_kept = self.prices.kept_bytes(
            [*(r for r in kept if r not in gathered), *self._left_for_hanging(fit.nodes)]
        )
        all_steps = with_turned(self.prices, steps, (fit.start, fit.stop))
        return Edge(fit.start, fit.stop, fusion.name, all_steps, bytes_kept, fusion, fit.whole, gathered)

    def _left_for_hanging(self, nodes: tuple[Node, ...]) -> list[Ref]:
        """A row op's output that ends a fusion and that later only hanging nodes read."""
        last = nodes[-1]
        hanging = last.traits.is_row and self.problem.hanging_reads.get(self.graph.first(last.output))
        return [self.problem.read_in_backward(last.output)] if hanging else []

    def _made_outside(self, ref: Ref, start: int, stop: int) -> bool:
        producer = self.graph.makers[ref.index] if ref.kind is VALUE else None
        return producer is not None and self.problem.priced_elsewhere(ref) and not start <= producer < stop

    def _node_of_fusion(self, fit: _Fit, k: int, targets: dict[str, Ref]) -> Step | None:
        """Node k of a fusion whose nodes run apart; None where forward withholds what it reads."""
        fusion, nodes, gradient, saved = fit.fusion, fit.nodes, fit.fusion.gradients[k], dict(fit.saved)
        inputs = [(name, saved.get(name) or self.problem.in_match(fusion, nodes, name)) for name in gradient.takes]
        inputs = _themselves(inputs, gradient) if gradient.by_attributes else inputs
        if any(self._is_withheld(r) for _, r in inputs):
            return None
        what = ("backward", fusion, fit.whole, k)
        return self.prices.once(what, functools.partial(self._made_node, fit, k, inputs, targets))

    def _made_node(self, fit: _Fit, k: int, inputs: Named, targets: dict[str, Ref]) -> Step:
        fusion, nodes, gradient = fit.fusion, fit.nodes, fit.fusion.gradients[k]
        outputs = tuple((name, targets[name]) for name in gradient.produces)
        price = Price("of_node", (fusion, fit.match, nodes, k, inputs, outputs))
        produces = frozenset(gradient.produces)
        task = fusion_task(self.problem, fusion, "backward", nodes, fit.match, produces, gradient)
        chain = "input" in gradient.produces
        return self.prices.step(fusion.name, (fit.start, fit.stop), inputs, outputs, task, price, chain=chain)

    def _why_no_fusion(self, fusion: Fusion, start: int, stop: int) -> str | None:
        nodes = self.nodes[start:stop]
        forward = self.nodes[slice(*fusion.covers("forward", start, stop))]
        if fusion.has_forward and not self.problem.ends_in_a_tensor(forward):
            return NO_TENSOR
        covered = self.nodes[slice(*fusion.covers("backward", start, stop))]
        if (unmeasured := why_unmeasured(covered, forward=False)) is not None:
            return unmeasured
        named = (
            *self.problem.read_in_match(fusion, covered),
            *(name for gradient in fusion.gradients for name in gradient.reads),
        )
        absent = self.problem.why_not_there(fusion, covered, named, stored=False)
        if absent is not None:
            return absent
        read = [self.problem.in_match(fusion, covered, name) for name in named if name not in fusion.saves]
        inner = {ref.index for ref in self.problem.inner_gradients(fusion, covered).values()}
        taken = {ref.index for ref in read if ref.kind is GRADIENT} - inner
        made = [v for n in nodes[:-1] for v in (n.output, *n.named_out)]
        leaving = [*(v for v in made if self.problem.read_outside(v, start, stop)), *nodes[-1].named_out]
        untaken = [v for v in leaving if self.graph.needs_grad(v) and v not in taken]
        if untaken:
            names = ", ".join(plain(self.graph.values[v].name) for v in untaken)
            return f"{names} is also read outside the pattern"
        return self._why_other_gradients(fusion, nodes, [nodes[-1].output, *taken, *inner])

    def _why_other_gradients(self, fusion: Fusion, nodes: tuple[Node, ...], taken: list[int]) -> str | None:
        """Reason for which gradient dtypes, those `taken` or the ops' own, do not fit; or None."""
        for v in (self.graph.values[v] for v in taken):
            if v.gradient is not None and v.gradient not in fusion.takes_gradients_in:
                return f"the gradient of {plain(v.name)} arrives in {text_of(v.gradient)}, not in its own dtype"
        made = {v for n in nodes for v in (n.output, *n.named_out)}
        for node in nodes:
            for v in (self.graph.values[v] for v in {node.input, *node.named_in.values()} - made):
                if not v.needs_grad or (v.gradient is None and node.traits.gradient_dtype is None):
                    continue
                if (given := node.gradient_dtype(v.spec.dtype)) != v.gradient_dtype:
                    wanted = text_of(v.gradient_dtype)
                    return f"the gradient of {plain(v.name)} is wanted in {wanted}, and it gives {text_of(given)}"
        return None

    def _fusion_inputs(self, fit: _Fit) -> Named:
        nodes = fit.nodes
        inputs: Named = [("dy", gradient_ref(nodes[-1].output))]
        reads = self.problem.read_in_match(fit.fusion, nodes)
        inputs += [(name, self.problem.in_match(fit.fusion, nodes, name)) for name in reads]
        inputs += fit.saved
        have = {name for name, _ in inputs}
        for k, node in enumerate(nodes):
            # masks and the like are the caller's: backward may read them without saying so
            masks = [(a, v) for a, v in node.named_in.items() if not node.traits.reads[a].gradient]
            inputs += [(f"{k}.{a}", self.graph.ref(v)) for a, v in masks]
            own = [p for p in node.parameters if f"{k}.{p}" not in have]
            inputs += [(f"{k}.{p}", self.problem.parameter_ref(node, p)) for p in own]
        return [*inputs, *([("seed", SEED)] if any(n.traits.draws for n in nodes) else [])]

    def _fusion_gradients(self, nodes: tuple[Node, ...]) -> tuple[set[str], list[tuple[str, Ref]]]:
        needed: set[str] = set()
        outputs: list[tuple[str, Ref]] = []
        if self.graph.needs_grad(nodes[0].input):
            needed.add("input")
            outputs.append(("input", gradient_ref(nodes[0].input)))
        made = {v for n in nodes for v in (n.output, *n.named_out)}
        for k, node in enumerate(nodes):
            for name in sorted(self.problem.needed(node) - {"input"}):
                if node.named_in.get(name) in made:
                    continue
                needed.add(f"{k}.{name}")
                outputs.append((f"{k}.{name}", self.problem.gradient_target(node, name)))
        return needed, outputs


def _themselves(read: Named, gradient: Gradient) -> list[tuple[str, Ref]]:
    """Reads of a backward node; parameters whose attributes it asks come uncast."""
    return [(name, ref._replace(form=AS_MADE) if name in gradient.by_attributes else ref) for name, ref in read]

"""A pass: what ranks exchange moves by copy engines where the GPUs of a group can write to one another.

A product next to an exchange becomes one step with it: own rows are multiplied first, or last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from te_fuser.fuser.graph.refs import AS_MADE, PART, Ref
from te_fuser.fuser.plan.overlap import awaited, started, starts_something
from te_fuser.fuser.plan.plan import Refusal
from te_fuser.fuser.steps.function_tasks import GATHERED, FunctionTask, PeerProductTask
from te_fuser.fuser.steps.op_tasks import OpTask
from te_fuser.fuser.steps.step import Price, Step
from te_fuser.fusions import registry
from te_fuser.kernels import peers
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.sharding.rules import rule_of

if TYPE_CHECKING:
    from te_fuser.distributed.exchange import Exchange
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.plan.plan import Plan, SegmentPlan
    from te_fuser.fuser.plan.prices import Prices
    from te_fuser.fuser.plan.problem import Options, Problem
    from te_fuser.fusions.match import Cost


class _Pair(NamedTuple):
    """The numbers of the steps that start an exchange and wait for it, and what it does."""

    start: int
    wait: int
    exchange: Exchange
    group: Group


def with_copies(plan: Plan, prices: Prices) -> Plan:
    """The plan whose exchanges run by copy engines, beside products where these are next to them."""
    if not starts_something(plan):
        return plan
    refusals: dict[Refusal, None] = {}
    found = plan.changed(lambda segment, direction: _InSegment(segment, prices, direction, refusals).steps())
    return replace(found, refusals=(*plan.refusals, *refusals))


def why_not(options: Options, graph: Graph, group: Group) -> str | None:
    """The reason for which a group cannot exchange by copies in a plan; None where it may."""
    if not registry.enabled(registry.PEER_COPIES):
        return "it is disabled"
    if options.device.kind != "cuda":
        return f"copy engines are of GPUs, and the plan is for {options.device.name}"
    # A GPU that is not at hand cannot be asked.
    return None if options.capability is not None else peers.obstacle(group, graph.values[0].spec.device)


def go_by_copies(problem: Problem, node: Node) -> bool:
    """True where an op of ranks exchanges by copies."""
    group = rule_of(node.op).group(node.op)
    return group.size > 1 and why_not(problem.options, problem.graph, group) is None


def _pairs(steps: Sequence[Step]) -> list[_Pair]:
    waits = {ref: k for k, s in enumerate(steps) if (ref := awaited(s)) is not None}
    found = []
    for k, step in enumerate(steps):
        ref, task = started(step), step.task
        if ref is None or not isinstance(task, OpTask) or not isinstance(task.node.op, UnfusedOperation):
            continue
        op = task.node.op
        exchange, group = op.exchange(task.gradient is not None), rule_of(op).group(op)
        if exchange is not None and group.size > 1 and ref in waits:
            found.append(_Pair(k, waits[ref], exchange, group))
    return found


class _InSegment:
    """The steps of one direction of a segment, in which exchanges are made one step with products."""

    def __init__(self, segment: SegmentPlan, prices: Prices, direction: str, refusals: dict[Refusal, None]) -> None:
        self._given, self._graph = segment.steps(direction), prices.problem.graph
        self._prices, self._direction, self._refusals = prices, direction, refusals
        self._held = {*segment.gives, *segment.returned, *[k.ref for k in segment.kept]}
        self._behind: dict[int, Step] = {}

    def steps(self) -> tuple[Step, ...]:
        found: dict[int, Step | None] = dict(enumerate(self._given))  # without those that are in another one now
        for pair in _pairs(self._given):
            why = why_not(self._prices.problem.options, self._graph, pair.group)
            if why is None and (pair.exchange.cut, pair.exchange.join) == (None, None):
                why = "a sum that all ranks get is left to NCCL"
            if why is not None:
                self._refuse(pair, why)
                continue
            found |= self._beside_product(pair, found) or self._alone(pair)
        made = [(step, self._behind.get(k)) for k, step in found.items()]
        return tuple([step for pair in made for step in pair if step is not None])

    def _refuse(self, pair: _Pair, why: str) -> None:
        step = self._given[pair.start]
        self._refusals[Refusal(self._direction, step.start, step.stop, registry.PEER_COPIES, why)] = None

    def _alone(self, pair: _Pair) -> dict[int, Step | None]:
        """The step that starts the exchange, now by copies; the one that waits stays as it is."""
        step = self._given[pair.start]
        assert isinstance(step.task, OpTask)
        by = peers.PeersOf(pair.group, self._graph.values[0].spec.device)
        return {pair.start: replace(step, task=replace(step.task, peers=by))}

    def _beside_product(self, pair: _Pair, steps: dict[int, Step | None]) -> dict[int, Step | None] | None:
        """One step in the place of the two and of a product; None, with the reason said."""
        if not self._given[pair.wait].chain:  # what is gathered again, for the gradient of a weight
            return None
        found = self._gathering(pair, steps) if pair.exchange.cut is None else self._scattering(pair, steps)
        if isinstance(found, str):
            self._refuse(pair, f"it is no step with a product: {found}")
            return None
        return found

    def _gathering(self, pair: _Pair, steps: dict[int, Step | None]) -> dict[int, Step | None] | str:
        start, wait = self._given[pair.start], self._given[pair.wait]
        (gathered,) = wait.writes()
        readers = [k for k, s in steps.items() if s is not None and gathered in s.reads()]
        if not readers or gathered.form != AS_MADE:
            return "nothing here reads what is gathered"
        first, step = readers[0], steps[readers[0]]
        assert step is not None
        product = step.task.row_product
        if product is None or step.reads().count(gathered) != 1 or dict(step.inputs).get(product.takes[0]) != gathered:
            return f"{step.name} is no product of the rows that are gathered, by cuBLASLt"
        why = self._why_not_rows(self._sent(start), pair.exchange.join, pair)
        if why:
            return why
        inputs = tuple((n, self._sent(start) if r == gathered else r) for n, r in step.inputs)
        gives = ((GATHERED, gathered),) if len(readers) > 1 or gathered in self._held else ()
        made = self._step(False, step, start, inputs, (*step.outputs, *gives), pair)
        return {pair.start: None, pair.wait: None, first: made}

    def _scattering(self, pair: _Pair, steps: dict[int, Step | None]) -> dict[int, Step | None] | str:
        start, wait = self._given[pair.start], self._given[pair.wait]
        made = self._sent(start)
        number = next((k for k, s in steps.items() if s is not None and made in s.writes()), None)
        step = None if number is None else steps[number]
        product = None if step is None else step.task.row_product
        if number is None or step is None or product is None or len(step.outputs) != 1 or len(product.gives) != 1:
            return "no product of rows by cuBLASLt makes what is scattered here"
        reads = Counter(r for k, s in steps.items() if s is not None and k != pair.wait for r in s.reads())
        if reads[made] != 1 or made in self._held or made.form != AS_MADE:
            return "what is scattered is read by others, too"
        why = self._why_not_rows(made, pair.exchange.cut, pair)
        if why:
            return why
        found = self._step(True, step, start, step.inputs, wait.outputs, pair)
        return {
            pair.start: None,
            pair.wait: None,
            **(self._added_by_kernel(number, found, pair, steps) or {number: found}),
        }

    def _added_by_kernel(
        self, number: int, scatter: Step, pair: _Pair, steps: dict[int, Step | None]
    ) -> dict[int, Step | None] | None:
        """The scatter without its sum, and the kernel that adds up the parts; None: none does."""
        ((_, summed),) = scatter.outputs
        readers = [(k, s) for k, s in steps.items() if s is not None and k != pair.wait and summed in s.reads()]
        kernel = readers[0][1].task.kernel if len(readers) == 1 else None
        if kernel is None or summed in self._held or not registry.enabled(registry.PEER_SUMS):
            return None
        parts = [Ref(PART, scatter.start, name=f"{rank}") for rank in range(pair.group.size)]
        adding = kernel.adding(summed, parts)
        if adding is None or not readers[0][1].writes():
            return None
        k, reader = readers[0]
        buffer = Ref(PART, scatter.start, name="buffer")
        made = self._prices.kernel_step(adding, reader.start, reader.stop)
        assert isinstance(scatter.task, PeerProductTask)
        task = replace(scatter.task, adds=False)  # type: ignore[call-arg]
        outputs = (*[(f"part {rank}", ref) for rank, ref in enumerate(parts)], ("buffer", buffer))
        read = ("buffer", buffer), ("read by", made.writes()[0])  # which ties it behind the kernel
        covers, price = (scatter.start, scatter.stop), Price("of_nothing", ())
        close = FunctionTask(peers.closed, own_memory=True)
        self._behind[k] = self._prices.step(f"{scatter.name}.close", covers, read, (), close, price)
        return {number: replace(scatter, outputs=outputs, task=task), k: replace(made, chain=reader.chain)}

    def _why_not_rows(self, ref: Ref, dim: int | None, pair: _Pair) -> str:
        """Reason for which the ranks' blocks along a dimension are not runs of rows, if any."""
        spec = ref.spec(self._graph)
        if spec is None or len(spec.shape) < 2 or dim is None or dim % len(spec.shape):
            return f"the blocks of ranks lie along dimension {dim}, not one behind the other"
        return "ranks have their blocks in turns" if pair.exchange.balanced else ""

    @staticmethod
    def _sent(start: Step) -> Ref:
        return next(r for name, r in start.inputs if name in ("input", "dy"))

    def _step(
        self,
        scatters: bool,
        product: Step,
        start: Step,
        inputs: tuple[tuple[str, Ref], ...],
        outputs: tuple[tuple[str, Ref], ...],
        pair: _Pair,
    ) -> Step:
        device = self._graph.values[0].spec.device
        task, name = PeerProductTask(product.task, scatters, pair.group, device), "scatter_" if scatters else "gather_"
        covers = min(product.start, start.start), max(product.stop, start.stop)
        price = Price(_cost, (product.price, start.price, product.cost, start.cost))
        return self._prices.step(name + product.name, covers, inputs, outputs, task, price, chain=product.chain)


def _cost(prices: Prices, product: Price | None, exchange: Price | None, *known: Cost) -> Cost:
    multiplied, sent = (k if p is None else prices.cost(p) for p, k in zip((product, exchange), known, strict=True))
    hidden = prices.problem.options.device.link.beside
    return replace(multiplied, sent=sent.sent, ranks=sent.ranks, beside=hidden, hidden=0.0)

"""What steps take and what keeping takes: bytes of tensors, costs of kernels, ops and fusions, predicted seconds."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from te_fuser import dtypes
from te_fuser.formula.expr import Axes
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.formula.rows import batch_layout
from te_fuser.fuser.graph.refs import GRADIENT, RECOMPUTED, Ref
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.match import Cost, Match
from te_fuser.ops.unfused_operation import UnfusedOperation
from te_fuser.sharding.rule import rule_of

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Price, Task
    from te_fuser.fusions.match import ByBlocks
    from te_fuser.fusions.registry import Fusion

Made = TypeVar("Made")
_SCRATCH_LAUNCHES = 10
# What passes over scratch call of PyTorch, views included, and random numbers by PyTorch's operations.
_SCRATCH_CALLS, _DRAW_CALLS = 32, 60
# The speed of a product with an epilogue, over one without: a row op that a kernel nearby does anyway is not worth one.
_EPILOGUE = 0.99

_FREE = {"input", "const", "value", "concat"}

Named = Iterable[tuple[str, Ref]]


class Prices:
    """Costs within one problem.

    Attributes:
        share: of the host's seconds beside a device's, how many a second of the host weighs: what is to be the least is
            the larger of two sums, and no shortest path sees that. On a CPU, which is its own host, they are added up.
        exact: whether they see the sizes of the call, and not those of the grid; no plan depends on such prices.
    """

    def __init__(self, problem: Problem, share: float = 0.0, exact: bool = False) -> None:
        self.problem, self.share, self.exact = problem, share, exact
        self.graph = problem.asked.exact() if exact else problem.graph
        device = problem.options.device
        self._on_cpu, self._calls = device.kind == "cpu", device.host.calls
        self._seen = Match.exact if exact else Match.rounded
        self._saving: dict[Ref, tuple[Fusion, Match, list[tuple[str, Ref]]]] = {}
        self._by_rows: dict[Ref, tuple[int, int]] = {}
        self._like: dict[Ref, Ref] = {}
        self._sizes: dict[Ref, int] = {}  # of what joint fusions save
        self._kernels: dict[tuple[int, int, int], tuple[Cost, KernelDescription]] = {}
        self._made: dict[Hashable, Any] = {}

    def sharing(self, share: float) -> Prices:
        """The same with another share, on which nothing depends that is made once."""
        found = copy.copy(self)
        found.share = share
        return found

    def once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """A step, or several, by what it does and where, made when it is first asked for."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]  # type: ignore[no-any-return]

    # ----------------------------------------------------------------------------------------- bytes

    def learn(self, fusion: Fusion, match: Match, saved: list[tuple[str, Ref]]) -> None:
        """Note the bytes of what a joint fusion saves."""
        if saved[0][1] in self._saving:
            return
        self._saving[saved[0][1]] = fusion, match, saved
        sizes = fusion.asked("saved_bytes", self._seen(match)) if fusion.saved_bytes else {}
        self._sizes |= {ref: sizes.get(name, 0) for name, ref in saved}

    def learn_like(self, ref: Ref, like: Ref) -> None:
        """Note that what a fusion saves is as large as what it saves elsewhere, if it saves that there."""
        if like not in self._sizes:  # nobody needs a gradient
            return
        self._like[ref] = like
        self._sizes[ref] = self._sizes[like]

    def learn_rows(self, ref: Ref, value: int, each: int) -> None:
        """Note a tensor of `each` bytes for each row of a value."""
        self._by_rows[ref] = value, each
        self._sizes[ref] = each * self.graph.values[value].spec.rows

    def at_exact_sizes(self) -> Prices:
        """The same for the sizes of the call."""
        found = Prices(self.problem, self.share, exact=True)
        for saving in self._saving.values():
            found.learn(*saving)
        for ref, like in self._like.items():
            found.learn_like(ref, like)
        for ref, (value, each) in self._by_rows.items():
            found.learn_rows(ref, value, each)
        return found

    def size(self, ref: Ref) -> int:
        """The bytes of a tensor."""
        learned = self._sizes.get(ref)
        return ref.bytes(self.graph) if learned is None else learned

    def kept_bytes(self, refs: Iterable[Ref]) -> int:
        """What keeping these for backward takes, the call's own inputs and parameters apart; a view takes nothing."""
        storages = {self.graph.stored(r) for r in refs}
        ours = (r for r in storages if r.kind.counts != "parameters" and self.graph.owner(r) == "activation")
        return sum(map(self.size, ours))

    # ----------------------------------------------------------------------------------------- steps

    def step(
        self,
        name: str,
        covers: tuple[int, int],
        inputs: Named,
        outputs: Named,
        task: Task,
        price: Price,
        *,
        chain: bool = True,
    ) -> Step:
        """A step over the ops covers[0]..covers[1]-1, with what it takes the device and the host."""
        cost, seconds, host = self._asked(price, task, covers[0])
        return Step(name, *covers, tuple(inputs), tuple(outputs), task, cost, seconds, host, chain, price)

    def priced(self, step: Step) -> Step:
        """The step with what these prices say that it takes."""
        if step.price is None:
            return step
        cost, seconds, host = self._asked(step.price, step.task, step.start)
        return replace(step, cost=cost, seconds=seconds, host=host)

    def _asked(self, price: Price, task: Task, start: int) -> tuple[Cost, float, float]:
        """What steps with the same question take, which is asked once."""
        return self.once(price, lambda: self._told(price, task, start))

    def cost(self, price: Price) -> Cost:
        """What is asked for."""
        asked = price.method
        return getattr(self, asked)(*price.arguments) if isinstance(asked, str) else asked(self, *price.arguments)

    def _told(self, price: Price, task: Task, start: int) -> tuple[Cost, float, float]:
        """What is asked for, and the predicted times of the device and of the host."""
        cost = self.cost(price)
        host = self._host(task, cost)
        seconds = self.seconds(cost, self.graph.nodes[start])
        return cost, seconds + host if self._on_cpu else seconds, host

    def _host(self, task: Task, cost: Cost) -> float:
        """The seconds of the host for a call: as stated, else by the kind of call and what it starts."""
        calls = self._calls
        if cost.calls is not None or cost.seconds is not None or not cost.launches:
            return (cost.calls or 0.0) * calls["torch"]
        if task.description is not None and self.problem.options.target == "torch":
            return calls["torch"] * cost.launches
        several = cost.launches - 1 if task.call in ("method", "recorded backward") else 0
        return calls[task.call] + calls["torch"] * several

    # ----------------------------------------------------------------------------------------- costs

    def seconds(self, cost: Cost, node: Node) -> float:
        """The predicted time, in the dtype that an op gets."""
        return self.problem.options.device.seconds(cost, dtypes.name_of(self.graph.arithmetic(node)))

    def of_launch(self, inputs: Named, outputs: Named, flops: float) -> Cost:
        """One launch that reads and writes these tensors once."""
        read = sum(self.size(r) for r in {r for _, r in inputs})
        return Cost(read, sum(self.size(r) for r in {r for _, r in outputs}), flops)

    def of_nothing(self) -> Cost:
        """No launch, as of views."""
        return Cost(launches=0)

    def of_sum(self, ref: Ref, additions: int) -> Cost:
        """So many additions of tensors like this one."""
        size = self.size(ref)
        return Cost(2 * size * additions, size * additions, 0.0, additions)

    def of_sums_over_ranks(self, refs: Iterable[Ref], ranks: int) -> Cost:
        """Tensors laid together, added up over ranks and laid apart; nothing for none, as to wait for that."""
        size = sum(map(self.size, refs))
        if not size:
            return Cost(launches=0)
        return Cost(2 * size, 2 * size, launches=2, sent=2 * size * (ranks - 1) / ranks, ranks=ranks, beside=1.0)

    def of_kernel(self, kernel: KernelTask, node: Node) -> Cost:
        """A row kernel for what an op gets."""
        if not kernel.computes:
            return Cost(launches=0)
        spec, description = self.graph.values[node.input].spec, kernel.description
        rows, samples = spec.rows, batch_layout(spec.shape, kernel.batch_dim)[1]
        key = (id(description), rows, samples)
        if key not in self._kernels:
            generated = self.problem.options.target != "torch"
            # The description is kept too, so that its id is not given to another one.
            self._kernels[key] = kernel_cost(description, rows, samples, generated), description
        return self._kernels[key][0]

    def of_opaque(self, node: Node, inputs: Named, outputs: Named, work: float, scratch: float) -> Cost:
        """An opaque op's own code: `work` times its products in forward, `scratch` times its scratch."""
        assert isinstance(node.op, UnfusedOperation)
        sent = node.op.sent_bytes(self.graph.values[node.input].spec, back="dy" in dict(inputs))
        if node.op.views and not sent:
            return Cost(launches=0)
        c = self.of_launch(inputs, outputs, flops_of(self.graph, [node]) * work)
        if sent and (group := rule_of(node.op).group(node.op)).size > 1:
            c = replace(c, sent=sent, ranks=group.size, beside=1.0, hidden=self._hidden(outputs))
        extra = node.op.scratch_bytes(self.graph.values[node.input].spec) * scratch
        if not extra:
            return c
        # Operations of their own go over the scratch, after the products and not beside them.
        seconds = self.seconds(c, node) + self.seconds(Cost(extra, extra, launches=_SCRATCH_LAUNCHES), node)
        calls = (_SCRATCH_CALLS + (_DRAW_CALLS if node.traits.draws else 0)) * scratch
        c = replace(c, read=c.read + extra, written=c.written + extra, launches=_SCRATCH_LAUNCHES)
        return replace(c, seconds=seconds, calls=calls)

    def _hidden(self, outputs: Named) -> float:
        """The share of sending that is expected to be hidden: in backward, beside gradients of parameters."""
        backward = any(r.kind in (GRADIENT, RECOMPUTED) for _, r in outputs)
        return self.problem.options.device.link.hidden if backward and any(self.graph.parameter_needs) else 0.0

    def of_fusion(
        self, fusion: Fusion, match: Match, nodes: tuple[Node, ...], direction: str, inputs: Named, outputs: Named
    ) -> Cost:
        """What a fusion says that it takes, else one launch with the products' operations."""
        stated = _stated(fusion, self._seen(match), direction)
        if direction == "backward":
            products = sum(len(self.problem.gradients(n)) for n in nodes if not n.traits.is_row)
            return stated or self.of_launch(inputs, outputs, flops_of(self.graph, nodes) * products)
        if stated is not None:
            return stated
        efficiency = _EPILOGUE if any(n.traits.is_row for n in nodes) else 1.0
        return replace(self.of_launch(inputs, outputs, flops_of(self.graph, nodes)), efficiency=efficiency)

    def of_fusion_by_blocks(self, by_blocks: ByBlocks, match: Match) -> Cost:
        """What a body takes with a tensor that comes by blocks."""
        return by_blocks.cost(self._seen(match))

    def of_node(
        self, fusion: Fusion, match: Match, nodes: tuple[Node, ...], k: int, inputs: Named, outputs: Named
    ) -> Cost:
        """Node k of a backward fusion whose nodes run apart: what the fusion says, else a launch with one product."""
        c = _stated(fusion, self._seen(match), "backward")
        stated = c[k] if isinstance(c, tuple) else c
        work = fusion.gradients[k].work
        products = flops_of(self.graph, nodes) * (1.0 if work is None else work)
        return stated or self.of_launch(inputs, outputs, products)


def _stated(fusion: Fusion, match: Match, direction: str) -> Any:
    """What the fusion says that it takes in a direction: a Cost, one for each of its nodes, or None."""
    c = fusion.costs(match)
    return c[direction == "backward"] if fusion.direction == "joint" and isinstance(c, tuple) else c


def kernel_cost(description: KernelDescription, rows: int, samples: int, generated: bool) -> Cost:
    """A row kernel: one pass if it is generated, one PyTorch operation for each node if it is interpreted."""
    full = [n for n in description.nodes if n.has_features and n.op not in _FREE and n.axes != Axes.FEATURE]
    size = rows * max(description.width, 1)
    operations = float(sum(FUNCTIONS[n.op].operations for n in full) * size)
    read, written = description.bytes_moved(rows, samples)
    if generated:
        return Cost(read, written, 0.0, 1, operations)
    nodes = [n for n in description.nodes if n.op not in _FREE]
    traffic = 4.0 * size * len(full)
    return Cost(read + 2 * traffic, written + traffic, 0.0, max(len(nodes), 1), operations)


def flops_of(graph: Graph, nodes: Iterable[Node]) -> float:
    """The products' floating-point operations in forward."""
    total = 0.0
    for n in nodes:
        specs = {name: graph.parameter_specs[p] for name, p in n.parameters.items()}
        total += n.op.flops(graph.values[n.input].spec, specs)
    return total

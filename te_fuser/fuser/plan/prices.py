"""The cost model: bytes of tensors, costs of kernels, ops and fusions, predicted seconds; and steps made with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from te_fuser import dtypes
from te_fuser.formula.evaluate import batch_layout
from te_fuser.formula.expr import Axes
from te_fuser.formula.functions import FUNCTIONS
from te_fuser.fuser.graph.refs import GRADIENT, RECOMPUTED, SAVED, SEED, Ref
from te_fuser.fuser.steps.step import Price, Step
from te_fuser.fusions.match import Cost, Match
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.tensor_function import TORCH_FUNCTIONS, TorchFunction
from te_fuser.sharding.rules import rule_of

if TYPE_CHECKING:
    from te_fuser.codegen.description import KernelDescription
    from te_fuser.fuser.graph.graph import Graph, Node
    from te_fuser.fuser.plan.problem import Problem
    from te_fuser.fuser.steps.kernel_task import KernelTask
    from te_fuser.fuser.steps.step import Task
    from te_fuser.fusions.match import ByBlocks
    from te_fuser.fusions.registry import Fusion

Made = TypeVar("Made")
_SCRATCH_LAUNCHES = 10
# What passes over scratch call of PyTorch, views included, and random numbers by PyTorch's operations.
_SCRATCH_CALLS, _DRAW_CALLS = 32, 60
# The speed of a product with an epilogue, over one without: a row op that a kernel nearby does anyway is not worth one.
_EPILOGUE = 0.99

_STATISTIC = 4  # bytes of a number for each row
_FREE = {"input", "const", "value", "concat"}

Named = Iterable[tuple[str, Ref]]
NOTHING = (0.0, 0.0)  # seconds, and those of the host


class CostModel:
    """Bytes, costs and predicted seconds of one problem, by sizes of the grid; by exact ones for show."""

    def __init__(self, problem: Problem, exact: bool = False) -> None:
        self.problem, self.exact = problem, exact
        self.graph = problem.asked.exact() if exact else problem.graph
        device = problem.options.device
        self.bandwidth, self._on_cpu, self._calls = device.bandwidth, device.kind == "cpu", device.host.calls
        self._saved: dict[Ref, int] = {}

    def _seen(self, match: Match) -> Match:
        return match.exact() if self.exact else match.rounded()

    # ----------------------------------------------------------------------------------------- bytes

    def size(self, ref: Ref) -> int:
        if ref.kind is not SAVED:
            return ref.bytes(self.graph)
        if ref not in self._saved:
            self._saved[ref] = self._saved_size(ref)
        return self._saved[ref]

    def _saved_size(self, ref: Ref) -> int:
        """The bytes of what a joint fusion saves, or a function that autograd records, by rows."""
        if ref in self.problem.saving:
            fusion, whole, name = self.problem.saving[ref]
            sizes = fusion.asked("saved_bytes", self._seen(self.problem.match(*whole))) if fusion.saved_bytes else {}
            return int(sizes.get(name, 0))
        node = self.problem.nodes[ref.index]
        function = torch_function_of(self.problem, node)
        return _STATISTIC * function.statistics * self.graph.values[node.input].spec.rows if function else 0

    def kept_bytes(self, refs: Iterable[Ref]) -> int:
        """Bytes that these take beside the call's own tensors; a view takes none."""
        storages = {self.graph.stored(r) for r in refs}
        ours = (r for r in storages if r.kind.counts != "parameters" and self.graph.owner(r) == "activation")
        return sum(map(self.size, ours))

    # ----------------------------------------------------------------------------------------- times

    def priced(self, step: Step) -> Step:
        if step.price is None:
            return step
        cost, seconds, host = self.takes(step.price, step.task, step.start)
        return replace(step, cost=cost, seconds=seconds, host=host)

    def takes(self, price: Price, task: Task, start: int) -> tuple[Cost, float, float]:
        """Cost of a step, and the seconds of the device and of the host."""
        cost = self.cost(price)
        host = self._host(task, cost)
        seconds = self.seconds(cost, self.graph.nodes[start])
        return cost, seconds + host if self._on_cpu else seconds, host

    def cost(self, price: Price) -> Cost:
        """Cost by a price's method: one of this model's, or a function."""
        asked = price.method
        return getattr(self, asked)(*price.arguments) if isinstance(asked, str) else asked(self, *price.arguments)

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
        return self.problem.options.device.seconds(cost, dtypes.name_of(self.graph.arithmetic(node)))

    def of_launch(self, inputs: Named, outputs: Named, flops: float) -> Cost:
        """Cost of one launch that reads and writes these tensors once."""
        read = sum(self.size(r) for r in {r for _, r in inputs})
        return Cost(read, sum(self.size(r) for r in {r for _, r in outputs}), flops)

    def of_nothing(self) -> Cost:
        return Cost(launches=0)

    def of_sum(self, ref: Ref, additions: int) -> Cost:
        size = self.size(ref)
        return Cost(2 * size * additions, size * additions, 0.0, additions)

    def of_sums_over_ranks(self, refs: Iterable[Ref], ranks: int) -> Cost:
        """Cost of tensors laid together, added up over ranks and laid apart."""
        size = sum(map(self.size, refs))
        if not size:
            return Cost(launches=0)
        return Cost(2 * size, 2 * size, launches=2, sent=2 * size * (ranks - 1) / ranks, ranks=ranks, beside=1.0)

    def of_kernel(self, kernel: KernelTask, node: Node) -> Cost:
        if not kernel.computes:
            return Cost(launches=0)
        spec, generated = self.graph.values[node.input].spec, self.problem.options.target != "torch"
        return kernel_cost(kernel.description, spec.rows, batch_layout(spec.shape, kernel.batch_dim)[1], generated)

    def of_opaque(self, node: Node, inputs: Named, outputs: Named, work: float, scratch: float) -> Cost:
        """Cost of an opaque op's own code: so many times its products and its scratch."""
        assert isinstance(node.op, UnfusedOperation)
        sent = node.op.sent_bytes(self.graph.values[node.input].spec, back="dy" in dict(inputs))
        if node.op.views and not sent:
            return Cost(launches=0)
        c = self.of_launch(inputs, outputs, flops_of(self.graph, [node]) * work)
        if sent and (group := rule_of(node.op).group(node.op)).size > 1:
            # Sending is expected to be hidden in part: in backward, beside gradients of parameters.
            backward = any(r.kind in (GRADIENT, RECOMPUTED) for _, r in outputs)
            link = self.problem.options.device.link
            hidden = link.hidden if backward and any(self.graph.parameter_needs) else 0.0
            c = replace(c, sent=sent, ranks=group.size, beside=1.0, hidden=hidden)
        extra = node.op.scratch_bytes(self.graph.values[node.input].spec) * scratch
        if not extra:
            return c
        # Operations of their own go over the scratch, after the products and not beside them.
        seconds = self.seconds(c, node) + self.seconds(Cost(extra, extra, launches=_SCRATCH_LAUNCHES), node)
        calls = (_SCRATCH_CALLS + (_DRAW_CALLS if node.traits.draws else 0)) * scratch
        c = replace(c, read=c.read + extra, written=c.written + extra, launches=_SCRATCH_LAUNCHES)
        return replace(c, seconds=seconds, calls=calls)

    def of_fusion(
        self, fusion: Fusion, match: Match, nodes: tuple[Node, ...], direction: str, inputs: Named, outputs: Named
    ) -> Cost:
        """Cost that a fusion states, else that of one launch with the products' operations."""
        stated = _stated(fusion, self._seen(match), direction)
        if direction == "backward":
            products = sum(len(self.problem.gradients(n)) for n in nodes if not n.traits.is_row)
            return stated or self.of_launch(inputs, outputs, flops_of(self.graph, nodes) * products)
        if stated is not None:
            return stated
        efficiency = _EPILOGUE if any(n.traits.is_row for n in nodes) else 1.0
        return replace(self.of_launch(inputs, outputs, flops_of(self.graph, nodes)), efficiency=efficiency)

    def of_fusion_by_blocks(self, by_blocks: ByBlocks, match: Match) -> Cost:
        return by_blocks.cost(self._seen(match))

    def of_node(
        self, fusion: Fusion, match: Match, nodes: tuple[Node, ...], k: int, inputs: Named, outputs: Named
    ) -> Cost:
        """Cost of node k of a backward fusion: as stated, else one launch with one product."""
        c = _stated(fusion, self._seen(match), "backward")
        stated = c[k] if isinstance(c, tuple) else c
        work = fusion.gradients[k].work
        products = flops_of(self.graph, nodes) * (1.0 if work is None else work)
        return stated or self.of_launch(inputs, outputs, products)


class Prices(CostModel):
    """The cost model of a plan that is made, for sizes of the grid, and its steps, each made once."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self._made: dict[Hashable, Any] = {}

    def once(self, what: Hashable, make: Callable[[], Made]) -> Made:
        """A step, or several, by what it does and where, made when it is first asked for."""
        if what not in self._made:
            self._made[what] = make()
        return self._made[what]  # type: ignore[no-any-return]

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
        cost, seconds, host = self.takes(price, task, covers[0])
        return Step(name, *covers, tuple(inputs), tuple(outputs), task, cost, seconds, host, chain, price)

    def kernel_step(self, kernel: KernelTask, start: int, stop: int, price: Price | None = None) -> Step:
        """A row kernel as the step for the ops start..stop-1; made anew where its price is given."""
        if price is None:
            what = start, stop, kernel.inputs, kernel.outputs, kernel.raised, kernel.aliases
            own = Price("of_kernel", (kernel, self.problem.nodes[start]))
            return self.once(what, lambda: self.kernel_step(kernel, start, stop, own))
        description = kernel.description
        names = [load.name for load in description.loads]
        outs = [t.name for t in description.stores] + [t.name for t in description.sums]
        inputs = list(zip(names, kernel.inputs, strict=True))
        inputs += [(m.name, ref) for m, ref in zip(description.maxima, kernel.raised, strict=True)]
        if description.streams:
            inputs.append(("seed", SEED))
        outputs = list(zip(outs, (o.ref for o in kernel.outputs), strict=True))
        outputs += [(f"= {ref.label(self.graph)}", new) for new, ref in kernel.aliases]
        made = {r for _, r in outputs}
        inputs += [(f"alias {k}", ref) for k, (_, ref) in enumerate(kernel.aliases) if ref not in made]
        if kernel.lead not in {r for _, r in inputs}:
            inputs.append(("shape", kernel.lead))
        name = description.name if kernel.computes else "alias"
        return self.step(name, (start, stop), inputs, outputs, kernel, price)


def _stated(fusion: Fusion, match: Match, direction: str) -> Any:
    """Cost that the fusion states for a direction: a Cost, one for each of its nodes, or None."""
    c = fusion.costs(match)
    return c[direction == "backward"] if fusion.direction == "joint" and isinstance(c, tuple) else c


@functools.lru_cache(4096)
def kernel_cost(description: KernelDescription, rows: int, samples: int, generated: bool) -> Cost:
    """A row kernel: one pass if it is generated, else one PyTorch operation a node."""
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


def torch_function_of(problem: Problem, node: Node) -> TorchFunction | None:
    """The function that is named for the op's kind and what it reads here, which all has one dtype."""
    x, named = problem.graph.values[node.input].spec, TORCH_FUNCTIONS.of(node.op.kind)
    if named is None:
        return None
    specs = [problem.parameter_ref(node, name).spec(problem.graph) for name in node.parameters]
    specs += [problem.graph.values[v].spec for v in node.named_in.values()]
    if any(s is None or s.dtype != x.dtype for s in specs):
        return None
    if node.op.flops(x, {}) and dtypes.name_of(x.dtype) in problem.options.device.converts:
        return None
    names, who = (*node.parameters, *node.named_in), f"torch_function of {node.op.kind.__name__}"
    found = named if isinstance(named, TorchFunction) else named(node.op, x, names)
    if found is None:
        return None
    if not isinstance(found, TorchFunction):
        raise TypeError(f"{who} gives a TorchFunction, or None, got {found!r}")
    if {*found.reads, "input"} != {*names, "input"}:
        raise ValueError(f"{who}: {found.name!r} reads {found.reads}, where the op has {('input', *names)}: name these")
    return found

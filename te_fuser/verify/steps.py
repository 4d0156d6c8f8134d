"""Sequential(verify=True): every step of both plans is checked on the data it sees, when it has run.

Beside its numbers a step promises to leave what it reads as it is, and to make what the plan says, in memory. Each
promise is checked where it is made: at each step, on the very tensors that it reads and makes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from te_fuser.codegen.description import padded
from te_fuser.compare import UPSTREAM, Tensors, doubled, judge, same_bits
from te_fuser.distributed.dtensor import own_part
from te_fuser.dtypes import FLOAT8, FLOATING
from te_fuser.formula.evaluate import unrounded
from te_fuser.fuser.graph.graph import Node
from te_fuser.fuser.graph.reference import run_nodes
from te_fuser.fuser.graph.refs import (
    GRADIENT,
    PARAMETER,
    PARAMETER_GRADIENT,
    RECOMPUTED,
    SEED,
    VALUE,
    Ref,
    gradient_ref,
)
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run.loading import execute, load
from te_fuser.fuser.run.program import misshapen
from te_fuser.fuser.steps.step import Runner, SlotMap, Slots, Step
from te_fuser.fusions import registry
from te_fuser.params.main_grad import caught
from te_fuser.sharding.rules import joint_ops
from te_fuser.verify.report import VerificationError


class Promises:
    """The promises of one step of a plan."""

    def __init__(self, plan: Plan, step: Step, slots: SlotMap) -> None:
        self._graph, self._task = plan.graph, step.task
        self._inputs = tuple((name, slots[ref]) for name, ref in step.inputs)
        self._outputs = tuple((ref, slots[ref]) for ref in step.writes())
        covered = [plan.graph.nodes[k] for k in range(step.start, step.stop)]
        self._written = {name for node in covered for name in node.op.writes}
        bound = [(name, ref.index) for name, ref in step.inputs if ref.kind is PARAMETER]
        self._written |= {name for name, index in bound if plan.graph.parameters[index].written}
        direction = "forward" if any(step is s for s in plan.forward) else "backward"
        self.label = f"{direction} step {step.name!r} over {', '.join(node.label for node in covered)}"

    def before(self, slots: Slots) -> dict[str, torch.Tensor]:
        """Copies of the step's inputs, to be compared with the inputs when it has run."""
        looked_at = [(name, slots[k]) for name, k in self._inputs if name not in self._written]
        return {name: t.clone() for name, t in looked_at if isinstance(t, torch.Tensor)}

    def broken(self, slots: Slots, before: Mapping[str, torch.Tensor]) -> Iterator[str]:
        """Promises that the step did not keep, in words."""
        for name, k in self._inputs:
            if name in before and not same_bits(before[name], slots[k]):
                yield f"it changed its input {name!r}"
        for ref, k in self._outputs:
            if isinstance(slots[k], torch.Tensor) and (what := misshapen(self._graph, ref, slots[k])) is not None:
                yield what
        yield from self._shared(slots)

    def _shared(self, slots: Slots) -> Iterator[str]:
        """Outputs that lie in another tensor's memory, where the step says that it makes its own."""
        if not self._task.own_memory or self._task.aliases:
            return
        taken = {memory_of(slots[k]): f"its input {name!r}" for name, k in self._inputs}
        for ref, k in self._outputs:
            memory, what = memory_of(slots[k]), ref.label(self._graph)
            if memory is not None and memory in taken:
                yield f"{what} lies in the memory of {taken[memory]}, and its body says that it is plain"
            taken[memory] = what


def memory_of(t: Any) -> int | None:
    """Address at which a tensor's memory begins; None for anything without memory."""
    return t.untyped_storage().data_ptr() or None if isinstance(t, torch.Tensor) else None


def run_watched(
    fuser: Fuser, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...], said: list[str]
) -> Any:
    """Run the plan for x as `fuser.run` does; broken promises, in backward too, go to `said`."""
    known, call = fuser.prepare(x, inputs, outputs)
    plan = fuser.sized(known.plan, call)

    def wrap(step: Step, runner: Runner, slots: SlotMap) -> Runner:
        promises = Promises(plan, step, slots)

        def run(slots: Slots) -> None:
            before = promises.before(slots)
            runner(slots)
            said.extend(f"{promises.label}: {what}" for what in promises.broken(slots, before))

        return run

    return execute(load(known.plan, outputs, wrap=wrap), x, inputs, call.parameters)


_VALUE, _PARAMETER = "value ", "parameter "


def run_verified(
    fuser: Fuser, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()
) -> Any:
    """Run the plan for x as `fuser.run` does, and check each step against float64."""
    # What one step alone does not show: bytes of blocks, of a kernel and a product, and parts of sums, likewise.
    with registry.disabled(registry.BY_BLOCKS, registry.PEER_SUMS):
        known, call = fuser.prepare(x, inputs, outputs)
    plan = fuser.sized(known.plan, call)
    entering = {0: x, **{index: inputs[name] for name, index in known.named}}
    watch = _WatchedCall(plan, entering, call.parameters)
    # Segments of this call's own: what backward is checked against is what this forward saw.
    return execute(load(known.plan, outputs, wrap=watch.wrap), x, inputs, call.parameters)


class _WatchedCall:
    """Values that one call has computed so far, and the checks of its steps."""

    def __init__(self, plan: Plan, entering: Mapping[int, torch.Tensor], parameters: Sequence[torch.Tensor]) -> None:
        self.plan, self.graph = plan, plan.graph
        self.values = {value: t.detach() for value, t in entering.items()}
        self.given = parameters
        self.parameters = [own_part(p.detach()) for p in parameters]
        self.seed = torch.zeros(2, dtype=torch.int64, device="cpu")
        self.forward_steps = {id(step) for step in plan.forward}
        self.coarsest = plan.graph.coarsest

    def wrap(self, step: Step, runner: Runner, slots: SlotMap) -> Runner:
        """`runner`, checked; steps that are a single PyTorch operation run as they are."""
        if not (step.task.compares and step.outputs):
            return runner
        direction = "forward" if id(step) in self.forward_steps else "backward"
        return _CheckedRunner(self, step, direction, runner, slots)

    # --------------------------------------------------------------------------------------- data

    def entering(self, nodes: Iterable[Node]) -> list[int]:
        """The values that nodes read and do not make."""
        found: dict[int, None] = {}
        made: set[int] = set()
        for node in nodes:
            found |= dict.fromkeys(v for v in (node.input, *node.named_in.values()) if v not in made)
            made |= {node.output, *node.named_out}
        return list(found)

    def data(self, nodes: Iterable[Node]) -> dict[str, torch.Tensor]:
        """Values and parameters that nodes read, as they were in forward."""
        nodes = list(nodes)
        found = {}
        for v in self.entering(nodes):
            t = self.value(v)  # of 8 bits as float32, so that autograd rounds no gradient to these
            found[f"{_VALUE}{v}"] = t.float() if t.dtype in FLOAT8.values() else t
        numbers = {p for node in nodes for p in node.parameters.values()}
        return found | {f"{_PARAMETER}{p}": self.parameters[p] for p in sorted(numbers)}

    def take_made(self, given: Mapping[Ref, torch.Tensor]) -> None:
        """Note numbers that steps of this call have made, which the ops behind them read."""
        for ref, t in given.items():
            if ref.kind is PARAMETER and self.graph.parameters[ref.index].made_in_call:
                self.parameters[ref.index] = t

    def value(self, index: int) -> torch.Tensor:
        """A value as it was in forward; where no step made it, from the ops that would."""
        if index not in self.values:
            producer = self.graph.makers[index]
            assert producer is not None
            self.record([self.graph.nodes[producer]], {})
        return self.values[index]

    def run(self, nodes: Iterable[Node], data: Tensors, exact: bool) -> dict[int, torch.Tensor]:
        """Every value that nodes make from `data`, by plain PyTorch."""
        values = {int(k.removeprefix(_VALUE)): t for k, t in data.items() if k.startswith(_VALUE)}
        parameters = {int(k.removeprefix(_PARAMETER)): t for k, t in data.items() if k.startswith(_PARAMETER)}
        with unrounded() if exact else contextlib.nullcontext():
            run_nodes(nodes, values, parameters, self.seed, exact)
        return values

    def record(self, nodes: Iterable[Node], stored: Mapping[Ref, torch.Tensor]) -> None:
        """Keep the values that a forward step made, as stored, or exact."""
        nodes = list(nodes)
        with torch.no_grad():
            exact = self.run(nodes, doubled(self.data(nodes)), True)
        for value, t in exact.items():
            kept = stored.get(self.graph.ref(value), self.values.get(self.graph.roots[value]))
            self.values.setdefault(value, t.to(self.graph.values[value].spec.dtype) if kept is None else kept.detach())


class _CheckedRunner:
    """Runs one step and checks what it made."""

    def __init__(self, watch: _WatchedCall, step: Step, direction: str, runner: Runner, slots: SlotMap) -> None:
        self.watch, self.step, self.direction, self.runner = watch, step, direction, runner
        self.promises = Promises(watch.plan, step, slots)
        self.nodes = watch.graph.nodes[step.start : step.stop]
        self.inputs = [(name, ref, slots[ref]) for name, ref in step.inputs]
        self.outputs = [(ref, slots[ref]) for ref in step.writes()]
        marked = [n.parameters[name] for n in self.nodes for g in n.gradients for name in g.by_attributes]
        written = {_number(ref) for ref, _ in self.outputs if ref.kind in _CHECKED}
        self.into_main_grad = [p for p in marked if p in written]  # whose gradient goes there in this step
        self.together = any(one.takes is None for one in joint_ops([node.op for node in self.nodes]))
        self.label = self.promises.label

    def __call__(self, slots: Slots) -> None:
        before = self.promises.before(slots)
        main_grads = self._run(slots)
        for what in self.promises.broken(slots, before):
            raise VerificationError(f"{self.label}: {what}")
        given = {ref: slots[k].detach() for _, ref, k in self.inputs if isinstance(slots[k], torch.Tensor)}
        given |= {ref.by_rows: self._by_rows(ref, t) for ref, t in given.items() if ref.form.layout == "transposed"}
        self.watch.seed = given.get(SEED, self.watch.seed)
        self.watch.take_made(given)
        device = next(slots[k].device.type for _, k in self.outputs)
        with torch.enable_grad(), torch.autocast(device, enabled=False):
            if self.direction == "forward":
                self._check_forward(slots)
            else:
                self._check_backward(slots, given, main_grads)

    def _run(self, slots: Slots) -> dict[int, torch.Tensor]:
        """Run the step; what it gave to main_grads, by the number of the parameter."""
        with contextlib.ExitStack() as stack:
            weights = {p: self.watch.given[p] for p in self.into_main_grad}
            found = {p: stack.enter_context(caught(weight)) for p, weight in weights.items()}
            self.runner(slots)
        return {p: t.to(weights[p].dtype) for p, t in found.items() if t is not None}

    def _check_forward(self, slots: Slots) -> None:
        stored = {ref: slots[k].detach() for ref, k in self.outputs if ref.kind is VALUE}

        def evaluate(data: Tensors, exact: bool) -> dict[str, torch.Tensor]:
            with torch.no_grad():
                values = self.watch.run(self.nodes, data, exact)
            return {self._name(ref): self._as_stored(ref, values, exact) for ref in stored}

        self._judge({self._name(ref): t for ref, t in stored.items()}, self.watch.data(self.nodes), evaluate)
        self.watch.record(self.nodes, stored)

    def _check_backward(
        self, slots: Slots, given: Mapping[Ref, torch.Tensor], main_grads: Mapping[int, torch.Tensor]
    ) -> None:
        made = [v for node in self.nodes for v in (node.output, *node.named_out)]
        leaving = [v for v in made if gradient_ref(v) in given]
        data = self.watch.data(self.nodes)
        data |= {f"{UPSTREAM}{v}": given[gradient_ref(v)] for v in leaving}
        found: dict[str, torch.Tensor] = {}
        for ref, k in self.outputs:
            if ref.kind in _CHECKED:
                t = slots[k]
                if ref.kind is PARAMETER_GRADIENT:  # under autocast in the cast's dtype; autograd gives the parameter's
                    t = t.to(self.watch.graph.parameter_specs[ref.index].dtype)
                self._add(found, ref, main_grads.get(_number(ref), t))

        def evaluate(data: Tensors, exact: bool) -> dict[str, torch.Tensor]:
            return self._gradients(data, exact, leaving)

        self._judge(found, data, evaluate)

    def _gradients(self, data: Tensors, exact: bool, leaving: list[int]) -> dict[str, torch.Tensor]:
        """Results that the step is to make, by autograd over the reference."""
        graph, refs = self.watch.graph, [ref for ref, _ in self.outputs if ref.kind in _CHECKED]
        # The datum whose gradient each is.
        sources = {
            ref: f"{_VALUE if ref.kind is GRADIENT else _PARAMETER}{ref.index}"
            for ref in refs
            if ref.kind is not RECOMPUTED
        }
        wanted = set(sources.values())
        leaves = {k: t.detach().requires_grad_(k in wanted) for k, t in data.items() if not k.startswith(UPSTREAM)}
        values = self.watch.run(self.nodes, leaves, exact)
        found = {self._name(r): self._as_stored(r, values, exact) for r in refs if r.kind is RECOMPUTED}
        ends = [v for v in leaving if values[v].requires_grad]
        known = {f"{_VALUE}{v}": t for v, t in values.items()} | leaves
        order = [k for k in known if k in wanted]
        gradients: Iterable[torch.Tensor | None] = [None] * len(order)
        if ends and order:
            grads = [data[f"{UPSTREAM}{v}"].to(values[v].dtype) for v in ends]
            gradients = torch.autograd.grad(
                [values[v] for v in ends], [known[k] for k in order], grads, allow_unused=True
            )
        by_leaf = dict(zip(order, gradients, strict=True))
        for ref, source in sources.items():
            g = by_leaf[source]
            g = torch.zeros_like(known[source]) if g is None else g
            spec = None if exact or ref.kind is not GRADIENT else ref.spec(graph)
            self._add(found, ref, _laid_out(ref, g if spec is None else g.to(spec.dtype)))
        return found

    def _add(self, found: dict[str, torch.Tensor], ref: Ref, t: torch.Tensor) -> None:
        """Note a result. Ends of a fork are one value, whose gradient they share anyhow."""
        whole = ref._replace(index=self.watch.graph.roots[ref.index], term=0) if ref.kind is GRADIENT else ref
        name = self._name(whole)
        found[name] = found[name] + t if name in found else t

    def _as_stored(self, ref: Ref, values: Mapping[int, torch.Tensor], exact: bool) -> torch.Tensor:
        """A value that a step makes, in its stored form: the reference gives 8 bits as wider numbers."""
        t, graph = values[self.watch.graph.value_of(ref)].detach(), self.watch.graph
        spec = None if exact else ref.spec(graph)
        return _laid_out(ref, t if spec is None or spec.dtype in FLOATING.values() else t.to(spec.dtype))

    def _by_rows(self, ref: Ref, t: torch.Tensor) -> torch.Tensor:
        """The rows of what lies transposed."""
        spec = ref.by_rows.spec(self.watch.graph)
        return t if spec is None else t[:, : spec.rows].mT.reshape(spec.shape)

    def _name(self, ref: Ref) -> str:
        """A tensor of the step in words."""
        return ref.label(self.watch.graph)

    def _judge(self, found: Tensors, data: Tensors, evaluate: Any) -> None:
        if self.together:  # how often the reference runs depends on what each rank finds, and all have to run it
            return
        failed = [
            row
            for row in judge(self.label, found, data, evaluate, exactly=False, coarsest=self.watch.coarsest)
            if not row.passed
        ]
        if failed:
            raise VerificationError(str(max(failed, key=lambda row: row.share)))


# What a backward step makes that can be checked by itself; wrong statistics show in what is made of them.
_CHECKED = (GRADIENT, PARAMETER_GRADIENT, RECOMPUTED)


def _laid_out(ref: Ref, t: torch.Tensor) -> torch.Tensor:
    """Rows as they lie in the form of a ref."""
    if ref.form.layout == "rows":
        return t
    rows = t.flatten(0, -2) if t.dim() > 1 else t[None]
    turned = rows.new_zeros(rows.shape[1], padded(len(rows)))
    turned[:, : len(rows)] = rows.mT
    return turned


def _number(ref: Ref) -> int:
    """The parameter whose gradient it is; -1 where it is none's."""
    return ref.index if ref.kind is PARAMETER_GRADIENT else -1

"""The way of a call, from a list of ops to its result.

    call -> guards of the last call -> plan cache -> list passes -> graph -> covers -> plan passes -> executable -> run

`Fuser.run` goes that way. Every pass is listed here, in the order in which they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

import torch

from te_fuser import _native, dtypes
from te_fuser.distributed.consistency import shared_errors
from te_fuser.distributed.dtensor import waited
from te_fuser.distributed.group import has_ranks
from te_fuser.distributed.placement import Entering, entering_now
from te_fuser.fake_tensors import looking, stands_in
from te_fuser.fuser.graph.builder import GraphBuilder
from te_fuser.fuser.graph.list_passes import add_collectives, add_placements, autocast, check_dtensors, drop_noops
from te_fuser.fuser.graph.list_passes import entries as op_entries
from te_fuser.fuser.graph.op_instances import (
    CallSpecs,
    ListedOp,
    emptied,
    list_ops,
    numbered,
    results_like,
    with_attributes,
)
from te_fuser.fuser.graph.passes import rewrites, run_passes
from te_fuser.fuser.plan.device import device_of
from te_fuser.fuser.plan.exchanges import with_copies
from te_fuser.fuser.plan.layouts import store_by_blocks
from te_fuser.fuser.plan.overlap import delay_gradients, overlap_exchanges, retimed
from te_fuser.fuser.plan.overwriting import mark_overwrites
from te_fuser.fuser.plan.parameter_prep import prepare_parameters, raise_amaxes, zero_amaxes
from te_fuser.fuser.plan.plan import LAMBDA
from te_fuser.fuser.plan.planner import add_notes, cover, warn_of_large_results
from te_fuser.fuser.plan.planner import entries as step_entries
from te_fuser.fuser.plan.prices import CostModel
from te_fuser.fuser.plan.problem import Options
from te_fuser.fuser.plan.segmenting import borders
from te_fuser.fuser.plan.tuned import device_name, list_key, store_for
from te_fuser.fuser.run.call import (
    PLAIN,
    Call,
    CallModes,
    GuardedCall,
    OpSequences,
    check_input,
    in_dual_level,
    named_tensors,
    refuse_proxy,
    refuse_tangents,
)
from te_fuser.fuser.run.loading import Executable, execute, load, missing_notes, runs_alike, target_for, target_on_gpu
from te_fuser.fuser.run.plan_cache import KeptPlan, PlanCache, RankAgreement
from te_fuser.guards import Facts, still_hold
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.sizes import Questions
from te_fuser.params.binding import standing_in

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.device import Device
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.plan.prices import Prices

Result = TypeVar("Result")
_MODES = ("auto", "generated", "reference")
_FALLBACKS = ("warn", "error")

# Passes over a list of ops: f(list, call) -> list. Those of the call's context, as of FP8 regions, come after them.
LIST_PASSES: Mapping[str, Callable[[Sequence[ListedOp], CallSpecs], Sequence[ListedOp]]] = {
    "drop no-ops": drop_noops,
    "check DTensors": check_dtensors,
    "place on ranks": add_placements,
    "autocast": autocast,
    "add collectives": add_collectives,
}
# Passes over a whole plan: f(plan, prices) -> plan.
PLAN_PASSES: Mapping[str, Callable[[Plan, Prices], Plan]] = {
    "prepare parameters": prepare_parameters,
    "zero amaxes": zero_amaxes,
    "raise amaxes": raise_amaxes,
    "hand on by blocks": store_by_blocks,
    "exchange by copies": with_copies,
    "overlap": overlap_exchanges,
    "delay gradients": delay_gradients,
    "overwrite": mark_overwrites,
    "notes": add_notes,
}


def lower(listed: Sequence[ListedOp], call: CallSpecs) -> Sequence[ListedOp]:
    """The list as it runs in a call, which is all that the graph, the reference and verify see.

    Random streams are numbered before any pass, so that what passes add moves no draw.
    """
    found: Sequence[ListedOp] = numbered(listed)
    found = run_passes(LIST_PASSES, found, call, "ops", op_entries, "list")
    return run_passes(rewrites(call), found, call, "ops", op_entries) if call.around else found


def build_graph(listed: Sequence[ListedOp], call: CallSpecs) -> Graph:
    """The graph of a list in a call; every error in the list or in the inputs is raised here."""
    lowered = lower(listed, call)
    try:
        return GraphBuilder(listed, lowered, call).build()
    except TypeError as error:
        if call.autocast is not None or not _builds_under_autocast(listed, call):
            raise
        raise TypeError(f"{error}, or run under torch.autocast") from error


def _builds_under_autocast(listed: Sequence[ListedOp], call: CallSpecs) -> bool:
    try:  # also of devices that have no autocast
        call = replace(call, autocast=torch.get_autocast_dtype(call.x.device.type))
        GraphBuilder(listed, lower(listed, call), call).build()
    except (RuntimeError, TypeError, ValueError, LookupError):
        return False
    return True


def make_plan(graph: Graph, options: Options) -> Plan:
    """The plan of a graph, whole: what runs, shows and tunes it derives nothing of it again.

    It is chosen for the sizes of the call rounded up to the grid, and what it shows is of these.
    """
    with standing_in(graph.stand_ins):
        plan, _ = _cover_and_pass(graph, options)
    warn_of_large_results(plan, graph)
    return plan


def make_exact_plan(graph: Graph, options: Options) -> Plan:
    """The plan that `make_plan` makes, but what it shows is of the sizes of the call."""
    with standing_in(graph.stand_ins):
        plan, prices = _cover_and_pass(graph, options)
        return plan if graph.is_on_grid else retimed(plan.seen_by(CostModel(prices.problem, exact=True)))


def _cover_and_pass(graph: Graph, options: Options) -> tuple[Plan, Prices]:
    plan, prices = cover(graph, options, borders(graph) if options.summed_apart else frozenset())
    plan = run_passes(PLAN_PASSES, plan, prices, "steps", step_entries, "cover")
    _ = plan.written  # what it asks of sizes is asked now
    return plan, prices


class Fuser:
    """Plans a list of ops, forward and backward, and runs the plans.

    Args:
        ops: operations in order; `Linear` and other compound ops are lowered to elementary ones.
        memory: "fast" (keep what saves time), "balanced", "lean" (compute again what saves memory), or a budget in
            bytes for the activations kept for backward.
        kernels: "auto" (generated kernels where they can be had), "generated" (an error where they cannot),
            "reference" (PyTorch operations).
        fallback: what "auto" does where generated kernels cannot be had: "warn" once and run PyTorch's, or
            raise an "error" that says what is missing.
        holding: guards under which `ops` stay the same; without them the caller has to make a new Fuser.
    """

    def __init__(
        self,
        ops: Sequence[FusableOperation | ListedOp],
        *,
        memory: str | int = "balanced",
        kernels: str = "auto",
        fallback: str = "warn",
        holding: Facts | None = None,
    ) -> None:
        check_options(memory, kernels, fallback)
        for op in ops:
            if not isinstance(op, (FusableOperation, ListedOp)):
                of_class = "; of a class make one" * isinstance(op, type)
                raise TypeError(f"a Fuser takes ops, got {op!r}{of_class}; plain modules go into a Sequential")
        self.memory, self.kernels, self.fallback = memory, kernels, fallback
        self._lists = OpSequences(ops, holding or Facts())
        self._cache = PlanCache()
        self._last: GuardedCall | None = None
        self._agreement = RankAgreement()
        self._guards: tuple[Any, Facts] = (None, Facts())  # of calls in the modes of the last one

    def __getstate__(self) -> dict[str, Any]:
        return {"ops": self._lists.given, "memory": self.memory, "kernels": self.kernels, "fallback": self.fallback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ops = state.pop("ops")
        self.__init__(ops, **state)  # type: ignore[misc]

    def __call__(self, x: torch.Tensor, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """Run the plan for x; extra inputs by name, extra outputs in the order of `outputs`."""
        return self.run(x, inputs, tuple(outputs))

    # ------------------------------------------------------------------------------------- the way of a call

    def run(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()) -> Any:
        """Run the plan for x."""
        y = self.again(x, inputs, outputs)
        if y is not None:
            return y
        if type(x) not in PLAIN:
            x = waited(x)
        inputs = named_tensors(inputs) if inputs else inputs
        if type(x) not in PLAIN and stands_in(x):
            check_input(x)
            return results_like(self._graph(self.call(x, inputs, outputs)), outputs, x.device)
        executable, call, graph = self._prepare(x, inputs, outputs)
        return execute(executable if graph is None else executable.first(graph), x, inputs, call.parameters)

    def again(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()) -> Any:
        """Run the plan of the last call, if this one is like it; else nothing runs, and it gives None."""
        last = self._last
        if last is None:
            return None
        if last.function is not None:
            return _native.run_if_like(last, x, inputs, outputs)
        parameters = _native.like(last, x, inputs, outputs)
        return None if parameters is None else execute(last.executable, x, inputs, parameters)

    def prepare(
        self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()
    ) -> tuple[Executable, Call]:
        """The executable for a call, and the call, whose parameters are computed once."""
        return self._prepare(x, inputs, outputs)[:2]

    def _prepare(
        self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
    ) -> tuple[Executable, Call, Graph | None]:
        """Executable and call, as of `prepare`, and the graph of a call that was planned just now."""
        with shared_errors(self._lists.plain.groups):
            check_input(x)
            call = self.call(x, inputs, outputs)
            if in_dual_level():
                refuse_tangents(call.tensors)
            modes = call.ops.modes(x.device.type, outputs)
            unknown = self._agreement.unknown(call, modes)
            executable, graph = self._executable(call, modes)
        if unknown is not None:
            self._agreement.reach(unknown, call, modes, executable)
        guards, kind = self._guards, (x.device.type, modes)
        if guards[0] != kind:
            guards = self._guards = kind, call.ops.facts(modes, x.device.type)
        self._last = GuardedCall.of(call, modes, guards[1], executable) or self._last
        return executable, call, graph

    def call(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]) -> Call:
        """A call as it is now, with its parameters; what is computed is computed anew."""
        ops = self._lists.now(x.dtype)
        return Call(x, inputs, outputs, ops, ops.parameters())

    def _executable(self, call: Call, modes: CallModes) -> tuple[Executable, Graph | None]:
        """Executable from the cache, or of a plan that is made now: then with its graph."""
        shapes, form = call.signature(modes)
        found = self._cache.find(shapes, form)
        if found is not None:
            return found, None
        questions = Questions()

        def planned(questions: Questions | None) -> tuple[Plan, Graph]:
            graph, options = self.plan_inputs(call, questions, training=modes.training)
            return make_plan(graph, options), graph

        plan, graph = with_questions(planned, questions)
        same = (e for e in self._cache.prepared(form) if runs_alike(e.plan, plan))
        return self._cache.put(shapes, form, questions, next(same, None) or load(plan, call.outputs)), graph.exact()

    # ------------------------------------------------------------------------------------------ what is planned

    def plan_inputs(
        self,
        call: Call,
        questions: Questions | None = None,
        device: Device | None = None,
        training: tuple[bool, ...] | None = None,
    ) -> tuple[Graph, Options]:
        """Graph and options to plan by; every error in the list or in the input is raised here.

        Args:
            questions: notes what is asked of the sizes of the call; None: these are plain numbers.
            device: the roofline to plan for; by default the one of x's device.
            training: which ops are planned in training mode; by default those that are now.
        """
        check_input(call.x, planning=device is not None)
        arch = device.capability if device is not None else None  # of a GPU that need not be at hand
        absent = torch.device(device.kind) if device is not None and device.kind != call.x.device.type else None
        graph = self._graph(call, training, absent, questions, arch)
        at_hand, dtype, notes, tuned = graph.values[0].spec.device, graph.widest, graph.notes, dict[str, str]()
        if arch is not None:
            target = target_on_gpu(dtype, self.kernels)
        else:
            target = target_for(at_hand, dtype, self.kernels, self.fallback)
            lacks = self.kernels != "reference" and call.x.dtype in dtypes.GENERATED
            missing = missing_notes(target, at_hand, dtype) if lacks else ()
            notes = *missing, *[note for b in graph.parameters if (note := b.note())], *notes
        if device is None:
            tuned = {**store_for(device_name(at_hand)).find(list_key(graph, self.memory, self.kernels))}
        return graph, Options(
            device or device_of(at_hand),
            target,
            self.memory,
            arch,
            tuned,
            records=self.kernels == "auto",
            notes=notes,
            summed_apart=has_ranks(),
        )

    def _graph(
        self,
        call: Call,
        training: tuple[bool, ...] | None = None,
        absent: torch.device | None = None,
        questions: Questions | None = None,
        capability: tuple[int, int] | None = None,
    ) -> Graph:
        """The graph of a call, with its ops in these modes."""
        ops = call.ops
        known = dict(zip(ops.bound.bindings, call.parameters, strict=True))
        specs = CallSpecs.of(call.x, call.inputs, known, call.outputs, absent, questions, ops.around, capability)
        modes = ops.training() if training is None else training
        return build_graph([o.as_now(mode) for o, mode in zip(ops.listed, modes, strict=True)], specs)

    def plan(
        self,
        x: torch.Tensor,
        inputs: Mapping[str, torch.Tensor] | None = None,
        outputs: tuple[str, ...] = (),
        device: Device | None = None,
    ) -> Plan:
        """Plan such a call, without running or compiling anything.

        Args:
            device: the roofline to plan for; by default that of x's device. A plan for another device cannot run, so x
                and parameters may be on the meta device.
        """
        with looking():
            ops = self._lists.now(x.dtype)
            call = Call(x, named_tensors(inputs or {}), outputs, ops, ops.bound.looked_at())
            plan = with_questions(lambda questions: make_exact_plan(*self.plan_inputs(call, questions, device)))
        blanks: dict[Any, torch.nn.Parameter] = {}
        for node in plan.graph.nodes:  # nobody runs it, and who keeps it shall not keep a model
            emptied(node.op, blanks)
        return plan

    def sized(self, plan: Plan, call: Call) -> Plan:
        """The plan that a call runs by with the sizes of that call, whatever it was made for."""
        return replace(plan, graph=self._graph(call))

    def forget_plans(self) -> None:
        """Plan anew at the next call."""
        self._last = None
        self._cache.clear()

    def plans_kept(self) -> list[KeptPlan]:
        """Plan cache: the plans that calls have made, the last used first."""
        return self._cache.kept()


def with_questions(make: Callable[[Questions | None], Result], questions: Questions | None = None) -> Result:
    """Result of `make` for sizes that note questions, or for plain numbers where it takes no others."""
    questions = questions or Questions()
    try:
        return make(questions)
    except Exception:  # what else is wrong is raised again
        found = make(None)
        questions.tie()
        return found


def check_options(memory: str | int, kernels: str, fallback: str) -> None:
    """Check the options of a Fuser or Sequential; ValueError naming what was given and what there is."""
    if kernels not in _MODES:
        raise ValueError(f"kernels is one of {', '.join(_MODES)}, got {kernels!r}")
    if fallback not in _FALLBACKS:
        raise ValueError(f"fallback is one of {', '.join(_FALLBACKS)}, got {fallback!r}")
    known = isinstance(memory, str) and memory in LAMBDA
    if not known and (isinstance(memory, bool) or not isinstance(memory, int) or memory < 0):
        raise ValueError(
            f"memory is one of {', '.join(LAMBDA)} or a budget in bytes, a whole number such as 2**30 for 1 GiB, got "
            f"{memory!r}"
        )


# Op -> its class, what enters it and the facts that its fuser was made by, and the fuser; these must not hold the op:
# it would never be freed.
_alone: WeakKeyDictionary[FusableOperation, tuple[tuple[type, Entering], Facts, Fuser]] = WeakKeyDictionary()


def run_alone(
    op: FusableOperation, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str] = ()
) -> Any:
    """Run a single op by a plan that is kept as long as the op is."""
    if torch.compiler.is_compiling():
        from te_fuser.fuser.run.dynamo_break import outside_tracing

        return outside_tracing(_run_alone, op, x, inputs, outputs)
    return _run_alone(op, x, inputs, outputs)


def _run_alone(
    op: FusableOperation, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str]
) -> Any:
    if type(x) not in PLAIN:
        refuse_proxy(x)
    known, here = _alone.get(op), (type(op), entering_now(op))  # parametrize and fully_shard change the class
    if known is None or known[0] != here or not still_hold(known[1]):
        known = _alone[op] = here, op.facts(), Fuser(_listed_alone(op))
    return known[2].run(x, inputs, tuple(outputs))


def _listed_alone(op: FusableOperation) -> list[ListedOp]:
    """The op as a list that does not keep it alive: of a twin with the same attributes."""
    twin = with_attributes(op, op.__dict__)
    listed, known = [], entering_now(op)
    for item in list_ops([twin], "0"):
        bindings = item.lowered.bindings  # those of the twin's own parameters stay as they are
        bindings = {name: b if b.owner is twin else b.weak() for name, b in bindings.items()}
        listed.append(replace(item, lowered=replace(item.lowered, bindings=bindings), entering=known))
    return listed

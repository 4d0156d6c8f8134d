"""The Fuser: plans by signature, runs them, one autograd node for each segment."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch

from te_fuser import _native, dtypes
from te_fuser.config import config
from te_fuser.distributed.consistency import shared_errors
from te_fuser.distributed.dtensor import is_dtensor, waited
from te_fuser.distributed.group import has_ranks
from te_fuser.distributed.placement import Entering, entering_now
from te_fuser.facts import Facts, still_hold
from te_fuser.fuser.graph.builder import GraphBuilder
from te_fuser.fuser.graph.call_context import Keys, keys_now, prepared
from te_fuser.fuser.graph.listed import CallSpecs, ListedOp, emptied, list_ops, with_attributes
from te_fuser.fuser.graph.looked import results_like
from te_fuser.fuser.graph.lowering import numbered
from te_fuser.fuser.plan.device import Device, device_of
from te_fuser.fuser.plan.keeping import LAMBDA
from te_fuser.fuser.plan.planner import make_exact_plan, make_plan
from te_fuser.fuser.plan.problem import Options
from te_fuser.fuser.plan.tuned import Choices, device_name, list_key, store_for
from te_fuser.fuser.run import shared_plans
from te_fuser.fuser.run.kept import KeptPlan, PlanCache, Recent
from te_fuser.fuser.run.known import Call, Known, Listing, Modes
from te_fuser.fuser.run.loading import Prepared, execute, load, runs_alike
from te_fuser.fuser.run.targets import missing_notes, target_for, target_on_gpu
from te_fuser.fuser.run.tracers import REFERENCE, in_dual_level, refuse_proxy, refuse_tangents, refuse_tracers
from te_fuser.look import looking, stands_in
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.sizes import Questions
from te_fuser.ops.words import no_tensor

if TYPE_CHECKING:
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.fuser.plan.plan import Plan

_MODES = ("auto", "generated", "reference")
_FALLBACKS = ("warn", "error")
_CONTEXTS_KEPT = 8  # listings for these, of one Fuser
PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes of tensors that run


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
        holding: what holds while these are the ops; without it whoever calls has to know.
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
        self._given = tuple(ops)
        self._holding = holding or Facts()
        # Whoever gives ListedOps has lowered them, and makes a new Fuser when one changes.
        self._watched = tuple(o for o in ops if isinstance(o, FusableOperation))
        self._kept = PlanCache()
        self._known: Known | None = None  # the last call
        self._agreed: Recent[int] = Recent(lambda: config.shapes_kept)  # what ranks were found to run alike, its seed
        self._facts: tuple[Any, Facts] = (None, Facts())  # what held in these modes
        self._plain = self._list(0)
        self._within: dict[Keys, Listing] = {}  # by what surrounds calls
        self._count = itertools.count(1)

    def __getstate__(self) -> dict[str, Any]:
        return {"ops": self._given, "memory": self.memory, "kernels": self.kernels, "fallback": self.fallback}

    def __setstate__(self, state: dict[str, Any]) -> None:
        ops = state.pop("ops")
        self.__init__(ops, **state)  # type: ignore[misc]

    def _list(self, number: int) -> Listing:
        facts = Facts.of([self._holding, *[op.facts() for op in self._watched]])
        listed: list[ListedOp] = []
        for k, op in enumerate(self._given):
            listed += [op] if isinstance(op, ListedOp) else list_ops([op], str(k))
        return Listing(number, facts, numbered(listed))

    def _listing(self, x: torch.Tensor) -> Listing:
        """The ops as calls of such an x run them, listed anew where one of them is not as it was."""
        plain = self._plain
        if self._watched and not still_hold(plain.given):
            self._within = {}
            plain = self._plain = self._list(next(self._count))
        keys = keys_now(x.dtype)
        within, found = self._within, self._within.get(keys) if keys else plain
        ready = prepared((found or plain).listed, keys)
        if found is None or not ready.lasts:
            found = Listing(next(self._count), plain.given, ready.listed, keys)
        if keys and ready.lasts:
            if len(within) >= _CONTEXTS_KEPT and keys not in within:
                within.clear()
            found = within.setdefault(keys, found)
        found.ready = ready
        return found

    def __call__(self, x: torch.Tensor, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """Run the plan for x; extra inputs by name, extra outputs in the order of `outputs`."""
        return self.run(x, inputs, tuple(outputs))

    def run(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()) -> Any:
        """Run the plan for x.

        Raises:
            TypeError, ValueError: when the input does not fit the list; the message names the op and what to do.
        """
        y = self.again(x, inputs, outputs)
        if y is not None:
            return y
        if type(x) not in PLAIN:
            x = waited(x)
        if type(x) not in PLAIN and stands_in(x):
            check_input(x)
            call = self.call(x, named_tensors(inputs), outputs)
            return results_like(self._graph(call, call.listing.training()), outputs, x.device)
        inputs = named_tensors(inputs) if inputs else inputs
        prepared, call, promised = self._prepare_call(x, inputs, outputs)
        return execute(prepared if promised is None else prepared.first(promised), x, inputs, call.parameters)

    def again(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()) -> Any:
        """Run the plan of the last call, if this one is like it; else nothing runs, and it gives None."""
        known = self._known
        if known is None:
            return None
        if known.function is not None:
            return _native.run_if_like(known, x, inputs, outputs)
        parameters = _native.like(known, x, inputs, outputs)
        return None if parameters is None else execute(known.prepared, x, inputs, parameters)

    def prepare(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()) -> Prepared:
        """The prepared plan for a call like this one, from the cache or newly made."""
        return self.prepare_call(x, inputs, outputs)[0]

    def call(self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]) -> Call:
        """A call as it is now, with its parameters; what is computed is computed anew."""
        listing = self._listing(x)
        return Call(x, inputs, outputs, listing, listing.parameters())

    def prepare_call(
        self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...] = ()
    ) -> tuple[Prepared, Call]:
        """The prepared plan for a call, which has its parameters now: what is computed is computed here, once."""
        return self._prepare_call(x, inputs, outputs)[:2]

    def _prepare_call(
        self, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: tuple[str, ...]
    ) -> tuple[Prepared, Call, Graph | None]:
        """The same, and where the call was planned just now, its graph."""
        with shared_errors(self._plain.groups):
            check_input(x)
            call = self.call(x, inputs, outputs)
            if in_dual_level():
                refuse_tangents(call.tensors)
            modes = call.listing.modes(x.device.type, outputs)
            agreed = self._agreed_as(call, modes)
            found, graph = self._found(call, modes)
        if agreed is not None:
            shared_plans.compare_plans(call.listing.groups, call, found.plan, modes.words, found.draws)
            self._agreed.replace(*agreed)
        self._note(call, modes, found)
        return found, call, graph

    def _agreed_as(self, call: Call, modes: Modes) -> tuple[Hashable, int] | None:
        """By what ranks that share ops of the list compare this call, and its seed; None where there is no need to."""
        if not call.listing.groups:
            return None
        draws = any(op.draws() for op in call.listing.lowered)
        key, seed = call.signature(modes), shared_plans.seed_of(call.x.device) if draws else 0
        known = self._agreed.get(key)
        return None if known is not None and seed in (known, None) else (key, seed or 0)

    def _note(self, call: Call, modes: Modes, found: Prepared) -> None:
        """Remember by which plan a call runs, unless it computes parameters."""
        listing = call.listing
        if listing.computed and not all(name in place for place, name in listing.slots):
            return
        key = _native.call_key(call.tensors)
        if key is None:
            return
        if self._facts[0] != (kind := (call.x.device.type, modes)):
            self._facts = kind, listing.facts(modes, call.x.device.type)
        facts = self._facts[1]
        if listing.computed:
            facts = Facts.of([facts, *[b.facts() for b in listing.bound.bindings]])
        if listing.groups and found.draws:
            facts = Facts.of([facts, shared_plans.seed_facts(call.x.device)])
        held = tuple([t._spec for t in call.parameters if is_dtensor(t)])
        self._known = Known(facts, tuple(call.inputs), listing.slots, key, found, modes.outputs, found.function, held)

    def _found(self, call: Call, modes: Modes) -> tuple[Prepared, Graph | None]:
        """The prepared plan for a call that is not like the last one; with its graph, where it is planned now."""
        shapes, form = call.signature(modes)
        found = self._kept.find(shapes, form)
        if found is not None:
            return found, None
        questions = Questions()
        plan, graph = self._planned(make_plan, questions, call, modes.training)
        return self._kept.put(shapes, form, questions, self._prepared(form, plan, call.outputs)), graph.exact()

    def _prepared(self, form: Any, plan: Plan, outputs: tuple[str, ...]) -> Prepared:
        """A plan that is kept and runs what this one runs, or this one made ready to run."""
        alike = (p for p in self._kept.prepared(form) if runs_alike(p.plan, plan))
        return next(alike, None) or load(plan, outputs)

    def _planned(
        self,
        make: Callable[[Graph, Options], Plan],
        questions: Questions,
        call: Call,
        training: tuple[bool, ...],
        device: Device | None = None,
    ) -> tuple[Plan, Graph]:
        """A plan of a call, with what is asked of its sizes, and its graph."""
        graph, options = self.asked(call, device, training, questions)
        try:
            return make(graph, options), graph
        except Exception:  # maybe it takes none but plain numbers; what else is wrong is raised again
            plan = make(graph.exact(), options)
            questions.tie()
            return plan, graph

    def forget_plans(self) -> None:
        """Plan anew at the next call."""
        self._known = None
        self._kept.clear()

    def plans_kept(self) -> list[KeptPlan]:
        """The plans that later calls may run by, the one that was used last first."""
        return self._kept.kept()

    def sized(self, plan: Plan, call: Call) -> Plan:
        """The plan that a call runs by with the sizes of that call, whatever it was made for."""
        return replace(plan, graph=self._graph(call, call.listing.training()))

    def plan(
        self,
        x: torch.Tensor,
        inputs: Mapping[str, torch.Tensor] | None = None,
        outputs: tuple[str, ...] = (),
        device: Device | None = None,
    ) -> Plan:
        """Plan a call like this one, without running or compiling anything.

        Args:
            device: the roofline to plan for; by default the one of x's device. Another one's plan cannot run: x and
                the parameters count as if they were there, so they may be on the meta device.
        """
        with looking():
            listing = self._listing(x)
            call = Call(x, named_tensors(inputs or {}), outputs, listing, listing.bound.looked_at())
            plan, _ = self._planned(make_exact_plan, Questions(), call, listing.training(), device)
        blanks: dict[Any, torch.nn.Parameter] = {}
        for node in plan.graph.nodes:  # nobody runs it, and who keeps it shall not keep a model
            emptied(node.op, blanks)
        return plan

    def asked(
        self,
        call: Call,
        device: Device | None = None,
        training: tuple[bool, ...] | None = None,
        questions: Questions | None = None,
    ) -> tuple[Graph, Options]:
        """What is to be planned; every error in the list or in the input is raised here.

        Args:
            training: which ops are planned in training mode; by default those that are now.
            questions: what notes what is asked of the sizes of the call.
        """
        x = call.x
        check_input(x, planning=device is not None)
        there = torch.device(device.kind) if device is not None and device.kind != x.device.type else None
        modes = call.listing.training() if training is None else training
        arch = device.capability if device is not None and device.kind == "cuda" else None
        graph = self._graph(call, modes, there, questions or Questions(), arch)
        if device is not None and device.kind == "cuda":
            target = target_on_gpu(graph.widest, self.kernels)
            records, notes = self.kernels == "auto", graph.notes
            return graph, Options(
                device, target, self.memory, arch, records=records, notes=notes, summed_apart=has_ranks()
            )
        target = target_for(there or x.device, graph.widest, self.kernels, self.fallback)
        notes, records = self._notes(target, graph), self.kernels == "auto"
        options = Options(
            device or device_of(x.device), target, self.memory, records=records, notes=notes, summed_apart=has_ranks()
        )
        return graph, options if device is not None else replace(options, tuned=self._tuned(graph, x.device))

    def _graph(
        self,
        call: Call,
        training: tuple[bool, ...],
        absent: torch.device | None = None,
        questions: Questions | None = None,
        capability: tuple[int, int] | None = None,
    ) -> Graph:
        """The graph of a call in these modes."""
        listing = call.listing
        known = dict(zip(listing.bound.bindings, call.parameters, strict=True))
        given, around = (call.x, call.inputs, known, call.outputs, absent), (listing.around, capability)
        listed = [o.as_now(mode) for o, mode in zip(listing.listed, training, strict=True)]
        try:
            return GraphBuilder(listed, CallSpecs.of(*given, questions, *around)).build()
        except Exception:  # maybe an op takes none but plain numbers; what else is wrong is raised again
            if questions is None:
                raise
            graph = GraphBuilder(listed, CallSpecs.of(*given, None, *around)).build()
            questions.tie()
            return graph

    def _tuned(self, graph: Graph, device: torch.device) -> Choices:
        return store_for(device_name(device)).find(list_key(graph, self.memory, self.kernels))

    def _notes(self, target: str, graph: Graph) -> tuple[str, ...]:
        """Lines of plans beside their steps."""
        return (*self._missing(target, graph), *[note for b in graph.parameters if (note := b.note())], *graph.notes)

    def _missing(self, target: str, graph: Graph) -> tuple[str, ...]:
        """What plans for a device at hand have to do without, where kernels were wanted."""
        x = graph.values[0].spec
        if self.kernels == "reference" or x.dtype not in dtypes.GENERATED:
            return ()
        return tuple(missing_notes(target, x.device, graph.widest))


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The named inputs of a call; None counts as not given.

    Raises:
        TypeError: when one is not a plain, dense tensor.
    """
    found = {name: t if type(t) in PLAIN else waited(t) for name, t in inputs.items() if t is not None}
    for name, t in found.items():
        if type(t) not in PLAIN and not stands_in(t):
            if not isinstance(t, torch.Tensor):
                raise no_tensor(f"input {name!r}", t)
            raise TypeError(f"input {name!r} is a {type(t).__name__}; te_fuser takes plain tensors by name")
        if (remedy := _remedy(t)) is not None:
            raise TypeError(f"input {name!r}: te_fuser takes dense, materialized tensors; call {remedy} first")
    return found


def _remedy(t: torch.Tensor) -> str | None:
    """What makes a dense tensor of one whose memory does not hold its numbers as they are; None: that one does."""
    if t.is_nested:
        return ".to_padded_tensor()"
    if t.layout != torch.strided:
        return ".to_dense()"
    if t.is_conj():
        return ".resolve_conj()"
    return ".resolve_neg()" if t.is_neg() else None


def check_options(memory: str | int, kernels: str, fallback: str) -> None:
    """Check the options of a Fuser or Sequential.

    Raises:
        ValueError: naming what was given and what there is.
    """
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


def check_tensor(x: Any, where: str = "") -> None:
    """Check that an input is a tensor, which is all that a reference asks.

    Raises:
        TypeError: when it is none.
    """
    refuse_proxy(x)
    if not isinstance(x, torch.Tensor):
        raise no_tensor(f"te_fuser{where}", x)


def check_input(x: Any, planning: bool = False) -> None:
    """Check the main input of a call; one without values is enough for planning.

    Raises:
        TypeError: when x is not a plain tensor.
        ValueError: when x has no feature dimension.
    """
    check_tensor(x)
    if type(x) not in PLAIN and not stands_in(x):
        raise TypeError(
            f"te_fuser runs plain tensors, got {type(x).__name__}; unwrap it outside (DTensor: to_local()), "
            f"keep it out of tracing (torch.compiler.disable), or trace {REFERENCE}, which is plain PyTorch"
        )
    if not stands_in(x):
        refuse_tracers()
    if x.device.type == "meta" and not planning:
        raise TypeError(
            "te_fuser got a meta tensor, which has no values; move the model and input to a real device, "
            'or name one to plan for: plan(x, device="h200")'
        )
    if torch._C._are_functorch_transforms_active():
        raise TypeError(
            "te_fuser does not run inside torch.func transforms or vmap; call the model outside, or transform "
            f"{REFERENCE}, which is plain PyTorch"
        )
    if (remedy := _remedy(x)) is not None:
        raise TypeError(f"te_fuser takes dense, materialized tensors; call {remedy} first")
    if x.dim() == 0:
        raise ValueError("te_fuser takes [..., features], got a scalar tensor")


# Op -> its class, what enters it and the facts that its fuser was made by, and the fuser; these must not hold the op:
# it would never be freed.
_alone: WeakKeyDictionary[FusableOperation, tuple[tuple[type, Entering], Facts, Fuser]] = WeakKeyDictionary()


def run_alone(
    op: FusableOperation, x: torch.Tensor, inputs: Mapping[str, torch.Tensor], outputs: Sequence[str] = ()
) -> Any:
    """Run a single op by a plan that is kept as long as the op is."""
    if torch.compiler.is_compiling():
        from te_fuser.fuser.run.outside_tracing import outside_tracing

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
    """The op as a list that does not keep it alive: of another object, whose attributes are those of both."""
    twin = with_attributes(op, op.__dict__)
    listed, known = [], entering_now(op)
    for item in list_ops([twin], "0"):
        bindings = item.lowered.bindings  # those of the twin's own parameters stay as they are
        bindings = {name: b if b.owner is twin else b.weak() for name, b in bindings.items()}
        listed.append(replace(item, lowered=replace(item.lowered, bindings=bindings), entering=known))
    return listed

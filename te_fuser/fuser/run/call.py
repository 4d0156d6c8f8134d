"""A call before it is planned: tensors, the list that it runs, modes; guards of the last one; what is refused."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad, profiler
from torch.fx import _symbolic_trace

from te_fuser import _native
from te_fuser.distributed.dtensor import Lies, is_dtensor, waited
from te_fuser.fake_tensors import stands_in
from te_fuser.fuser.graph.op_instances import ListedOp, Parameters, autocast_of, bindings_of, list_ops, numbered
from te_fuser.fuser.graph.passes import Keys, ReadyList, keys_now, prepared
from te_fuser.fuser.plan.device import capturing
from te_fuser.fuser.run.plan_cache import groups_of, seed_facts
from te_fuser.fusions import registry
from te_fuser.guards import Facts, still_hold
from te_fuser.ops import op_table
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.checks import no_tensor

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.run.loading import Executable

PLAIN = (torch.Tensor, torch.nn.Parameter)  # the classes of tensors that run
_CONTEXTS_KEPT = 8  # lists for these, of one Fuser
_C = torch._C
_NO_AUTOCAST = (_C._is_any_autocast_enabled, False)
# torch.fx says that it traces by a flag of its module, and from 2.14 on by one of each thread.
_TRACING = getattr(_symbolic_trace, "_get_is_fx_tracing", None)
_NO_TRACE = () if _TRACING else ((vars(_symbolic_trace), "_is_fx_tracing_flag", False),)
_NO_TRACE_IN_THREAD = ((_TRACING, False),) if _TRACING else ()
_NOBODY_LOOKS = (
    (_C._are_functorch_transforms_active, False),
    (_C._len_torch_dispatch_stack, 0),
    (_C._get_tracing_state, None),
)


class Call(NamedTuple):
    """Arguments of a call, its list, and parameters in the order of the graph's."""

    x: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    ops: OpSequence
    parameters: Sequence[torch.Tensor]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the call: x, the named inputs and the parameters."""
        return (self.x, *self.inputs.values(), *self.parameters)

    def signature(self, modes: CallModes) -> tuple[tuple[torch.Size, ...], Hashable]:
        """The shapes of what is given, and everything else that a plan depends on."""
        x, grad = self.x, modes.grad
        shapes: tuple[torch.Size, ...] = (x.shape,)
        named: tuple[Any, ...] = ()
        if self.inputs:
            given = sorted(self.inputs.items())
            shapes += tuple([t.shape for _, t in given])
            named = tuple([(n, t.dtype, t.device, grad and t.requires_grad) for n, t in given])
        known = _native.tensor_key(self.parameters) or tuple(  # where one is no plain tensor
            [(p.__class__, p.shape, p.dtype, p.device, p.requires_grad, Lies.of(p)) for p in self.parameters]
        )
        return shapes, (x.dtype, x.layout, x.device, grad and x.requires_grad, named, known, modes)


class CallModes(NamedTuple):
    """Modes of a call, on which its plan depends beside tensors.

    Attributes:
        fusions: the fusions that there are in this scope.
        listing: the number of the `OpSequence`.
        states: the values of the switches that ops name.
        around: what surrounds the call.
    """

    grad: bool
    autocast: torch.dtype | None
    outputs: tuple[str, ...]
    fusions: Hashable
    capturing: bool
    listing: int
    training: tuple[bool, ...]
    states: tuple[Hashable, ...]
    around: tuple[Hashable, ...] = ()

    @property
    def words(self) -> str:
        """Modes that ranks have in common, in words."""
        training = f"training {''.join(map(str, map(int, self.training)))}, by op"
        return f"{'with' if self.grad else 'without'} gradients, autocast {self.autocast}, {training}"


class OpSequence:
    """The ops of a Fuser, lowered for calls in one context, while guards that they come from those given hold.

    `ready` is the list of the last call that was not known to be like the one before.
    """

    def __init__(self, number: int, given: Facts, listed: Sequence[ListedOp], around: Keys = ()) -> None:
        self.number, self.given, self.listed, self.around = number, given, tuple(listed), around
        self.ready = ReadyList(self.listed)
        self.bound = Parameters(bindings_of(listed))
        self.slots = tuple(b.slot for b in self.bound.bindings)
        there = zip(self.bound.bindings, self.slots, strict=True)
        self.computed = any(b.computed or name not in place for b, (place, name) in there)
        self.lowered = tuple(o.lowered.op for o in listed)
        kinds = dict.fromkeys(map(type, self.lowered))
        self.switches = tuple(dict.fromkeys(s for kind in kinds if (s := op_table.global_state.of(kind)) is not None))

    @functools.cached_property
    def groups(self) -> tuple[Group, ...]:
        return groups_of(self.listed)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters as they are now; what is computed is computed anew."""
        if self.computed:
            return self.bound.get()
        return [parameters[name] for parameters, name in self.slots]  # type: ignore[misc]

    def training(self) -> tuple[bool, ...]:
        return _native.attributes(self.lowered, "training")

    def modes(self, kind: str, outputs: tuple[str, ...]) -> CallModes:
        """Modes of a call on a kind of device; each is read once, since another thread may change it."""
        return CallModes(
            torch.is_grad_enabled(),
            autocast_of(kind) if _C._is_any_autocast_enabled() else None,
            outputs,
            registry.state(),
            capturing.get(),
            self.number,
            self.training(),
            tuple([state() for state in self.switches]),
            self.around,
        )

    def facts(self, modes: CallModes, kind: str) -> Facts:
        """Facts that hold while calls are in these modes, and nobody traces or profiles them."""
        any_autocast = _C._is_any_autocast_enabled()
        autocast = (functools.partial(autocast_of, kind), modes.autocast) if any_autocast else _NO_AUTOCAST
        now = Facts(
            items=(
                *[(vars(op), "training", mode) for op, mode in zip(self.lowered, modes.training, strict=True)],
                (vars(forward_ad), "_current_level", -1),
                *_NO_TRACE,
                (vars(profiler), "_is_profiler_enabled", False),
            ),
            calls=(
                (torch.is_grad_enabled, modes.grad),
                autocast,
                (registry.state, modes.fusions),
                (capturing.get, modes.capturing),
                *zip(self.switches, modes.states, strict=True),
                *_NOBODY_LOOKS,
                *_NO_TRACE_IN_THREAD,
            ),
        )
        return Facts.of([self.given, now, self.ready.facts()])


class OpSequences:
    """The list of a Fuser for each call context, made anew where one of its ops is not as it was.

    Who gives ListedOps in place of ops has lowered them, and makes a new Fuser when one changes. `holding` are guards
    beside those of the ops.
    """

    def __init__(self, given: Sequence[FusableOperation | ListedOp], holding: Facts) -> None:
        self.given, self._holding = tuple(given), holding
        self._watched = tuple(o for o in given if isinstance(o, FusableOperation))
        self._numbers = itertools.count()
        self.within: dict[Keys, OpSequence] = {}
        self.plain = self._listed()

    def _listed(self) -> OpSequence:
        facts = Facts.of([self._holding, *[op.facts() for op in self._watched]])
        listed: list[ListedOp] = []
        for k, op in enumerate(self.given):
            listed += [op] if isinstance(op, ListedOp) else list_ops([op], str(k))
        return OpSequence(next(self._numbers), facts, numbered(listed))

    def now(self, dtype: torch.dtype) -> OpSequence:
        """The list that a call of such an x runs now."""
        plain = self.plain
        if self._watched and not still_hold(plain.given):
            self.within = {}
            plain = self.plain = self._listed()
        keys = keys_now(dtype)
        within, found = self.within, self.within.get(keys) if keys else plain
        ready = prepared((found or plain).listed, keys)
        if found is None or not ready.lasts:
            found = OpSequence(next(self._numbers), plain.given, ready.listed, keys)
        if keys and ready.lasts:
            if len(within) >= _CONTEXTS_KEPT and keys not in within:
                within.clear()
            found = within.setdefault(keys, found)
        found.ready = ready
        return found


class GuardedCall(NamedTuple):
    """A call and the executable that it ran by; `_native.like(last, ...)` tells which calls are like it.

    Attributes:
        names: of the named inputs.
        slots: (dict, key) of each parameter.
        key: what is known of the input, the named ones and the parameters.
        function: what the plan comes to, where that is one function of the input and the parameters.
        held: what `key` knows by its address.
    """

    facts: Facts
    names: tuple[str, ...]
    slots: tuple[tuple[Mapping[str, Any], str], ...]
    key: bytes
    executable: Executable
    outputs: tuple[str, ...]
    function: Callable[..., torch.Tensor] | None = None
    held: tuple[Any, ...] = ()

    @classmethod
    def of(cls, call: Call, modes: CallModes, facts: Facts, executable: Executable) -> GuardedCall | None:
        """Guards of a call in these modes; None where it computes parameters itself."""
        ops = call.ops
        if ops.computed and not all(name in place for place, name in ops.slots):
            return None
        key = _native.call_key(call.tensors)
        if key is None:
            return None
        computed = [b.facts() for b in ops.bound.bindings] if ops.computed else []
        drawn = [seed_facts(call.x.device)] if ops.groups and executable.draws else []
        facts = Facts.of([facts, *computed, *drawn]) if computed or drawn else facts
        held = tuple([t._spec for t in call.parameters if is_dtensor(t)])
        return cls(facts, tuple(call.inputs), ops.slots, key, executable, modes.outputs, executable.function, held)


# ------------------------------------------------------------------------------------------------ checks of tensors


def named_tensors(inputs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The named inputs of a call, plain and dense; None counts as not given."""
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
    """Method that makes a dense tensor of one stored conjugated or negated; else None."""
    if t.is_nested:
        return ".to_padded_tensor()"
    if t.layout != torch.strided:
        return ".to_dense()"
    if t.is_conj():
        return ".resolve_conj()"
    return ".resolve_neg()" if t.is_neg() else None


def check_tensor(x: Any, where: str = "") -> None:
    """Check that an input is a tensor, which is all that a reference asks; TypeError when it is none."""
    refuse_proxy(x)
    if not isinstance(x, torch.Tensor):
        raise no_tensor(f"te_fuser{where}", x)


def check_input(x: Any, planning: bool = False) -> None:
    """Check the main input of a call; one without values is enough for planning."""
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


_MODES = _C._TorchDispatchModeKey
REFERENCE = _native.instead  # what runs in our place
_INSTEAD = (
    f"trace a module whose forward is {REFERENCE}, which is plain PyTorch: docs/works-with.md shows one, for "
    "make_fx, torch.jit.trace, torch.export and torch.compile"
)


def refuse_tracers() -> None:
    """Refuse a call that this thread traces; TypeError naming the tracer, and what to trace instead."""
    if _C._get_tracing_state() is not None:  # type: ignore[attr-defined]
        raise TypeError(f"te_fuser does not run under torch.jit.trace, which would record no kernel; {_INSTEAD}")
    before = _C._dispatch_tls_is_dispatch_key_included(_C.DispatchKey.PreDispatch)  # make_fx(pre_dispatch=True)
    if before or _C._get_dispatch_mode(_MODES.PROXY) is not None:
        raise TypeError(f"te_fuser does not run under make_fx, which would record no kernel; {_INSTEAD}")
    if _C._get_dispatch_mode(_MODES.FAKE) is not None:
        raise TypeError(f"te_fuser does not run under FakeTensorMode, whose tensors have no memory; {_INSTEAD}")


def refuse_proxy(x: Any) -> None:
    """Refuse what torch.fx.symbolic_trace hands in, before the model is looked at."""
    if isinstance(x, torch.fx.Proxy):
        raise TypeError(
            "te_fuser does not run under torch.fx.symbolic_trace, whose proxies have no shape to plan for; make the "
            f"model a leaf (Tracer.is_leaf_module), or give make_fx a function that calls {REFERENCE}"
        )


def refuse_tangents(tensors: Iterable[torch.Tensor]) -> None:
    """Refuse a call with a tensor that has a tangent, in a dual level."""
    if any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
        raise TypeError(
            "te_fuser has no forward-mode derivatives, and the result would have no tangent; differentiate "
            f"{REFERENCE}, which is plain PyTorch, in the forward_ad.dual_level() or by torch.func.jvp"
        )


def in_dual_level() -> bool:
    return forward_ad._current_level >= 0

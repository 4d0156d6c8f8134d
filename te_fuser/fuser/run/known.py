"""What a call depended on: facts that the native runtime compares with what is, and the call that was last."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd import forward_ad, profiler
from torch.fx import _symbolic_trace

from te_fuser import _native
from te_fuser.distributed.dtensor import Lies
from te_fuser.facts import Facts
from te_fuser.fuser.graph.call_context import Keys, ReadyList
from te_fuser.fuser.graph.listed import ListedOp, autocast_of, bindings_of
from te_fuser.fuser.graph.looked import Parameters
from te_fuser.fuser.plan.host import capturing
from te_fuser.fuser.run.shared_plans import groups_of
from te_fuser.fusions import registry
from te_fuser.ops import op_table

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.fuser.run.loading import Prepared

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


class Known(NamedTuple):
    """A call and the plan that it ran by; `_native.like(known, ...)` tells which are like it.

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
    prepared: Prepared
    outputs: tuple[str, ...]
    function: Callable[..., torch.Tensor] | None = None
    held: tuple[Any, ...] = ()


class Call(NamedTuple):
    """What a call is given, the list that it runs, and the parameters of the ops in the order of the graph's."""

    x: torch.Tensor
    inputs: Mapping[str, torch.Tensor]
    outputs: tuple[str, ...]
    listing: Listing
    parameters: Sequence[torch.Tensor]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All of them."""
        return (self.x, *self.inputs.values(), *self.parameters)

    def signature(self, modes: Modes) -> tuple[tuple[torch.Size, ...], Hashable]:
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


class Modes(NamedTuple):
    """What the plan of a call depends on beside tensors.

    Attributes:
        fusions: which there are, in this scope.
        listing: which listing of its ops the Fuser goes by.
        states: what the switches are that ops name.
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
        """What of it ranks have in common, in words."""
        training = f"training {''.join(map(str, map(int, self.training)))}, by op"
        return f"{'with' if self.grad else 'without'} gradients, autocast {self.autocast}, {training}"


class Listing:
    """The ops of a Fuser as it listed them once.

    Args:
        number: of this listing.
        given: what holds while the ops that were given come to these.
        listed: the ops.
        around: what surrounds calls of them.

    Attributes:
        ready: of the last call that was not known to be like the one before.
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
        """The ranks that share some of them."""
        return groups_of(self.listed)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters as they are now; what is computed is computed anew."""
        if self.computed:
            return self.bound.get()
        return [parameters[name] for parameters, name in self.slots]  # type: ignore[misc]

    def training(self) -> tuple[bool, ...]:
        """Which ops are in training mode now."""
        return _native.attributes(self.lowered, "training")

    def modes(self, kind: str, outputs: tuple[str, ...]) -> Modes:
        """Those of a call on a kind of device; each is read once, since another thread may change it."""
        return Modes(
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

    def facts(self, modes: Modes, kind: str) -> Facts:
        """What holds while calls on a kind of device are in these modes, and nobody traces or profiles them."""
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

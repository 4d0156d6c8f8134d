"""Bound: an op without parameters of its own, which reads another module's."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from te_fuser.guards import Facts
from te_fuser.ops.base import FusableOperation, LoweredOp, OpCall, Spec
from te_fuser.ops.checks import described
from te_fuser.ops.construction import constructed
from te_fuser.ops.hooks import hook_facts, hooks_of, refuse_hooks
from te_fuser.ops.op_table import OpTable
from te_fuser.params.binding import Binding, Given, GivenBinding, WeakBinding, has_tensor, owned, place_of
from te_fuser.params.concatenated_parameter import JoinedBinding, Transposed, TransposedBinding

# The ops that one stands for, each `Bound` to it.
bound_parts: OpTable[Callable[[Any], tuple[Bound, ...]] | None] = OpTable("bound_parts", None)
_FORM = 'write Bound(ops.MatMul(8, 16, device="meta"), module, weight="name of a parameter of the module")'


class Bound(FusableOperation):
    """Let an op read another module's parameters: `Bound(MatMul(8, 16, device="meta"), owner, weight="fc1_weight")`.

    The op's own parameters go; they are in no state_dict, and made on the meta device they take no memory.

    The owner is held weakly, since it mostly contains the op. A deepcopy and a pickle of the owner have ops that are
    bound to the copy. A copy of the op alone is bound to nothing, and an error says so when it is used.

    Args:
        op: an elementary op, or a `Linear`; of another one that stands for several, bind each.
        owner: the module to read from, which may get its parameters later.
        **names: for each parameter of the op the owner's name for it ("part.weight" is that of a module in it), or
            several, to be joined along dimension 0: see `Together`; or `Transposed(name)`.

    Raises:
        TypeError: when `op` is neither or has buffers, `owner` no module, or `names` are not those of its parameters.
        AttributeError: in a call, when the owner has no such parameter.
        ReferenceError: in a call, when the owner is gone.
    """

    _owner: Callable[[], torch.nn.Module | None]

    def __init__(
        self, op: FusableOperation, owner: torch.nn.Module, /, **names: str | Sequence[str] | Transposed
    ) -> None:
        super().__init__()
        parts_of = bound_parts.of(type(op))
        parts = () if parts_of is None else parts_of(op)
        if not isinstance(op, FusableOperation) or not (parts or [low.op for low in op.lower()] == [op]):
            to_do = "bind the ops it stands for" if isinstance(op, FusableOperation) else _FORM
            raise TypeError(f"Bound takes one elementary op, or an ops.Linear, got {described(op)}: {to_do}")
        if not isinstance(owner, torch.nn.Module):
            raise TypeError(f"Bound takes the module that has the parameters, got {described(owner)}: {_FORM}")
        for name, theirs in names.items():
            if not _names_in(theirs):
                raise TypeError(f"Bound takes a parameter's name as {name}, got {described(theirs)}: {_FORM}")
        own = [name for name, parameter in op._parameters.items() if parameter is not None]
        if set(own) != set(names):
            takes, given = ", ".join(own) or "none", ", ".join(names) or "none"
            raise TypeError(f"Bound takes a name for each parameter of {type(op).__name__} ({takes}), got {given}")
        if held := [*op._buffers, *op._modules]:
            kind = type(op).__name__
            raise TypeError(f"Bound keeps nothing of its op, and {kind} has {held[0]!r}: put it into a list")
        for name in own:
            setattr(op, name, None)
        # A tuple, so that torch.nn.Module does not take it for a submodule: whoever hooks all modules hooks this one.
        self._ops = (op,)
        self._read(owner, {name: names[name] for name in own})
        for part in parts:
            if names.keys() >= {*part._all_names()}:
                part._read(owner, {name: names[theirs] for name, (theirs,) in part._names.items()})
        constructed(self)

    def _read(self, owner: torch.nn.Module, names: Mapping[str, str | Sequence[str] | Transposed]) -> None:
        self._names = {name: _names_in(theirs) for name, theirs in names.items()}
        self._transposed = frozenset(name for name, theirs in names.items() if isinstance(theirs, Transposed))
        self._owner = weakref.ref(owner)

    def __getstate__(self) -> dict[str, Any]:
        # An ordinary reference, which copy and pickle lead to the owner's copy.
        return {**self.__dict__, "_owner": self._owner()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        owner = state["_owner"]
        super().__setstate__({**state, "_owner": (lambda: None) if owner is None else weakref.ref(owner)})
        constructed(self)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "training":
            self.op.train(value)

    @property
    def op(self) -> FusableOperation:
        """The op, without its parameters: a part of this module, and no module of the model's."""
        return self._ops[0]

    @property
    def owner(self) -> torch.nn.Module:
        """The module whose parameters are read."""
        owner = self._owner()
        if owner is None:
            names = ", ".join(self._all_names())
            raise ReferenceError(
                f"Bound({type(self.op).__name__}) reads {names} of a module that is gone: keep, copy and save it "
                "together with its owner"
            )
        return owner

    @property
    def names(self) -> dict[str, str | tuple[str, ...] | Transposed]:
        """Parameter of the op -> the owner's name for it, or several: what another one can be bound by."""
        return {name: self._given(name) for name in self._names}

    def _given(self, name: str) -> str | tuple[str, ...] | Transposed:
        theirs = self._names[name]
        if name in self._transposed:
            return Transposed(theirs[0])
        return theirs[0] if len(theirs) == 1 else theirs

    def facts(self) -> Facts:
        own = Facts.of([hook_facts(hooks_of(self.op)), self.op.facts()])
        return Facts.of([super().facts(), own, owned(self.owner, self._all_names())])

    def lower(self) -> list[LoweredOp]:
        refuse_hooks(self, "op", self.op)
        (op,) = self._ops
        bindings = {} if bound_parts.of(type(op)) else {name: self._binding(name) for name in self._names}
        return [replace(low, bindings={**bindings, **low.bindings}) for low in op.lower()]

    @property
    def reads_none(self) -> bool:
        """True where its owner has None in the place of a parameter, as a module without a bias does."""
        places = [place_of(self.owner, name) for name in self._all_names()]
        return any(not has_tensor(owner, name) and hasattr(owner, name) for owner, name in places)

    def _all_names(self) -> list[str]:
        return [name for names in self._names.values() for name in names]

    def _binding(self, parameter: str) -> Binding:
        names = self._names[parameter]
        places = [place_of(self.owner, name) for name in names]
        for owner, name in places:
            if not (has_tensor(owner, name) or isinstance(owner, Given)):
                raise AttributeError(
                    f"Bound({type(self.op).__name__}) reads {name!r} of {type(owner).__name__}, which has no parameter "
                    "of that name: give it one"
                )
        if parameter in self._transposed:
            return TransposedBinding(owner, name)
        if len(names) > 1:
            several = any(other is not owner for other, _ in places)
            return JoinedBinding(self.owner, names) if several else JoinedBinding(owner, tuple(n for _, n in places))
        if isinstance(owner, Given):
            return GivenBinding(owner, name)
        # Plans that an op is part of may outlive it; of those that it runs by alone `run_alone` takes care.
        return Binding(owner, name) if isinstance(owner, FusableOperation) else WeakBinding(owner, name)

    def named_inputs(self) -> Mapping[str, Any]:
        return self.op.named_inputs()

    def named_outputs(self) -> tuple[str, ...]:
        return self.op.named_outputs()

    def infer(self, x: Spec) -> Spec | Mapping[str, Spec]:
        return self.op.infer(x)

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec | Mapping[str, Spec]:
        return self.op.infer_from(x, inputs)

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        return self.op.flops(x, parameters)

    def draws(self) -> bool:
        return self.op.draws()

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return self.op.reference(call, x)

    def extra_repr(self) -> str:
        turned = dict.fromkeys(self._transposed, ".T")
        reads = [f"{name}={' + '.join(theirs)}{turned.get(name, '')}" for name, theirs in self._names.items()]
        return ", ".join([repr(self.op), *reads])


def _names_in(given: Any) -> tuple[str, ...]:
    """The names that somebody gave for a parameter; empty where these are no names."""
    given = given.name if isinstance(given, Transposed) else given
    names = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Sequence) else ()
    return names if all(isinstance(name, str) for name in names) else ()

"""A flattened list of ops, what planning knows of a call of it, and what a look at a call sees instead of tensors."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.compiler import is_compiling

from te_fuser.distributed.dtensor import Lies, is_dtensor
from te_fuser.fake_tensors import LastCall, NotSeenError, looking, maker_of, stands_in
from te_fuser.ops.base import FusableOperation, LoweredOp, Spec
from te_fuser.params.concatenated_parameter import parts_of
from te_fuser.record import record

if TYPE_CHECKING:
    from te_fuser.distributed.group import Group
    from te_fuser.distributed.placement import Entering
    from te_fuser.distributed.shard import Share
    from te_fuser.fuser.graph.graph import Graph
    from te_fuser.ops.sizes import Questions
    from te_fuser.params.binding import Binding, Key, StandIns

Module = TypeVar("Module", bound=torch.nn.Module)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@record()
class ListedOp:
    """An op in a flattened list.

    Attributes:
        path: where it is in the module tree.
        names_in, names_out: argument -> the name it reads, and the names it gives to its output, qualified by path.
        casts: parameters that it reads in another dtype than their own.
        stream: the number of its random stream: its place in the list before anything was added to that.
        share: what this rank has of its input, for what it draws; None: all.
        summed: parameters of whose gradient each rank of a group has a term.
        entering: what is known of what ranks have before it; of the first op, all go by it.
    """

    lowered: LoweredOp
    path: str
    names_in: Mapping[str, str]
    names_out: tuple[str, ...]
    scope: str = ""
    casts: Mapping[str, torch.dtype] = field(default_factory=dict)
    stream: int = -1
    share: Share | None = None
    summed: Mapping[str, Group] = field(default_factory=dict)
    entering: Entering = field(default_factory=dict)

    def as_now(self, training: bool) -> ListedOp:
        """A copy whose op keeps the attributes of now; it keeps no owner of its parameters alive."""
        known = self.lowered
        op = with_attributes(known.op, {**known.op.__dict__, "training": training})
        bindings = {name: b.weak() for name, b in known.bindings.items()}
        lowered = LoweredOp(op, bindings, known.suffix, known.places, known.aside)
        names = self.names_in, self.names_out
        return ListedOp(lowered, self.path, *names, self.scope, self.casts, self.stream, entering=self.entering)


def with_attributes(op: Module, attributes: dict[str, Any]) -> Module:
    """Another object of the op's class with these attributes; it does not keep the op alive."""
    made = object.__new__(type(op))
    object.__setattr__(made, "__dict__", attributes)
    return made


def emptied(module: torch.nn.Module, blanks: dict[Any, torch.nn.Parameter]) -> None:
    """Put blanks, one for all that are alike in a list, in place of the parameters of an op's copy."""
    held = module.__dict__
    parameters: dict[str, torch.nn.Parameter | None] = dict.fromkeys(held["_parameters"])
    for name, p in held["_parameters"].items():
        if p is not None:
            key = p.shape, p.dtype, p.requires_grad
            if key not in blanks:
                blank = torch.empty(p.shape, dtype=p.dtype, device="meta")
                blanks[key] = torch.nn.Parameter(blank, p.requires_grad)
            parameters[name] = blanks[key]
    held["_parameters"] = parameters
    if not held["_modules"]:
        held["_modules"] = {}
        return
    inner = {name: m for name, m in held["_modules"].items() if not isinstance(m, torch.jit.ScriptModule)}
    held["_modules"] = {name: None if m is None else with_attributes(m, {**m.__dict__}) for name, m in inner.items()}
    for made in filter(None, held["_modules"].values()):
        emptied(made, blanks)


@record()
class ParameterSpecs:
    """Properties of a parameter that planning knows: never its values.

    Attributes:
        kind: the class of the tensor.
        computed: whether it is computed in each call, and so nothing that could be looked at.
        lies: how it lies among ranks, of a DTensor; `spec` is that of this rank's own part.
        joined: the same of those that it was joined from.
    """

    spec: Spec
    requires_grad: bool
    kind: type
    computed: bool
    lies: Lies | None = None
    joined: tuple[Lies, ...] = ()

    @classmethod
    def of(cls, binding: Binding, t: torch.Tensor, absent: torch.device | None = None) -> ParameterSpecs:
        """Specs of a parameter that is `t` in this call."""
        if not is_compiling() and t.is_neg():
            raise TypeError(f"{binding.name} has its negative bit set: put {binding.name}.resolve_neg() in its place")
        kind = torch.Tensor if stands_in(t) else type(t)
        lies, spec = None, spec_of(t, absent)
        if kind not in _PLAIN and is_dtensor(t):
            lies = Lies.of(t)
            spec = spec if lies is None else replace(spec, shape=lies.shape)
        computed = binding.computed
        joined = tuple(filter(None, map(Lies.of, parts_of(t)))) if computed and not is_compiling() else ()
        return cls(spec, t.requires_grad, kind, computed, lies, joined)

    def stand_in(self) -> torch.Tensor:
        """A tensor without values in its place."""
        with looking() as look:
            return look.made(self.spec.shape, self.spec.dtype, self.spec.device, self.requires_grad)


@dataclass(frozen=True)
class CallSpecs:
    """Properties of one call that planning knows.

    Attributes:
        named: name -> the spec of a named input, and whether it needs a gradient.
        parameters: what is known of each parameter that an op of the list is bound to.
        autocast: the dtype that torch.autocast runs in; None outside of it.
        bindings: what `parameters` are known of, in the order in which calls give them.
        around: what surrounds the call, as `passes.keys_now` gives it.
        capability: the compute capability of a GPU that is only named.
        notes: takes lines for the plan.
    """

    x: Spec
    x_needs_grad: bool
    named: Mapping[str, tuple[Spec, bool]]
    parameters: Mapping[Key, ParameterSpecs]
    outputs: tuple[str, ...]
    grad: bool
    autocast: torch.dtype | None
    bindings: tuple[Binding, ...] = ()
    around: tuple[Hashable, ...] = ()
    capability: tuple[int, int] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        inputs: Mapping[str, torch.Tensor],
        parameters: Mapping[Binding, torch.Tensor],
        outputs: tuple[str, ...] = (),
        absent: torch.device | None = None,
        questions: Questions | None = None,
        around: tuple[Hashable, ...] = (),
        capability: tuple[int, int] | None = None,
    ) -> CallSpecs:
        """The specs of a call made now; `questions` note what is asked of all sizes but the features of x."""
        known = {b.key: ParameterSpecs.of(b, t, absent) for b, t in parameters.items()}
        specs = {name: spec_of(t, absent) for name, t in inputs.items()}
        spec = spec_of(x, absent)
        if questions is not None:
            spec = replace(spec, shape=(*questions.sizes(spec.shape[:-1]), *spec.shape[-1:]))
            specs = {name: replace(s, shape=questions.sizes(s.shape)) for name, s in sorted(specs.items())}
        named = {name: (s, inputs[name].requires_grad) for name, s in specs.items()}
        autocast = autocast_of(spec.device.type)
        grad = torch.is_grad_enabled()
        return cls(spec, x.requires_grad, named, known, outputs, grad, autocast, tuple(parameters), around, capability)

    def stand_ins(self) -> StandIns:
        return {key: p.stand_in for key, p in self.parameters.items() if p.computed}


def autocast_of(kind: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def spec_of(t: torch.Tensor, device: torch.device | None = None) -> Spec:
    return Spec(tuple(t.shape), t.dtype, device or t.device)


def bindings_of(listed: Iterable[ListedOp]) -> list[Binding]:
    """The parameters that ops are bound to, each once, in their order; last what passes may bind."""
    items = list(listed)
    found: dict[Key, Binding] = {}
    for bindings in ([item.lowered.bindings for item in items], [item.lowered.aside for item in items]):
        for binding in itertools.chain(*[given.values() for given in bindings]):
            found.setdefault(binding.key, binding)
    return list(found.values())


def numbered(listed: Sequence[ListedOp]) -> list[ListedOp]:
    return [op if op.stream == place else replace(op, stream=place) for place, op in enumerate(listed)]


def list_ops(ops: Iterable[FusableOperation], prefix: str = "") -> list[ListedOp]:
    """A flat list of ops outside any Sequential: every name stays as it is."""
    listed = []
    for op in ops:
        for low in op.lower():
            names = {arg: given.name for arg, given in low.op.named_inputs().items()}
            listed.append(ListedOp(low, prefix + low.suffix, names, low.op.named_outputs()))
    return listed


class Parameters:
    """The parameters of a list: those that are there, and those that each call computes."""

    def __init__(self, bindings: Sequence[Binding]) -> None:
        self.bindings = tuple(bindings)
        told = [k for k, b in enumerate(bindings) if b.computed and not b.tells]
        self._last = {number: LastCall() for number in told}

    def get(self) -> list[torch.Tensor]:
        """The parameters as they are now; those that are computed are computed anew."""
        found = [b.taken() for b in self.bindings]
        for number, last in self._last.items():
            binding = self.bindings[number]
            last.note(maker_of(binding.owner, binding.name), (), (), (found[number],))
        return found

    def looked_at(self) -> list[torch.Tensor]:
        """The parameters, and what stands for those computed; NotSeenError where that takes a real call."""
        return [self._look_at(b, k) if b.computed else b.get() for k, b in enumerate(self.bindings)]

    def _look_at(self, binding: Binding, number: int) -> torch.Tensor:
        owner, name = binding.owner, binding.name
        last = self._last.get(number)
        gave = None if last is None else last.gave(maker_of(owner, name), (), ())
        with looking() as look:
            if (known := binding.look(look.made)) is not None:
                return known
            if gave is not None:
                return look.made(*gave[0])
            try:
                return look.computed(owner, name)
            except Exception as error:  # whatever a user's module raises that looks at values
                raise NotSeenError(
                    f"{name} of {type(owner).__name__} is computed in each call, and what it will be cannot be told "
                    f"without values ({type(error).__name__}: {error}); call the model once, then look"
                ) from error


def results_like(graph: Graph, outputs: Sequence[str], device: torch.device) -> Any:
    """Stand-ins for the results of a call, where x is on `device`: y, or (y, *outputs)."""
    values = [graph.values[v] for v in (graph.output, *(graph.named_outputs[n] for n in outputs))]
    with looking() as look:
        made = tuple(look.made(v.spec.shape, v.spec.dtype, device, v.needs_grad) for v in values)
    return made if outputs else made[0]

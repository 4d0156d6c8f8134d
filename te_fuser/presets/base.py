"""Preset: a list of ops over parameters that it owns, under Transformer Engine's names."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar

import torch

from te_fuser import ops
from te_fuser.checkpointing import checkpoint
from te_fuser.distributed.dtensor import filled
from te_fuser.fused_regions import FusedRegion
from te_fuser.ops import FusableOperation, Together
from te_fuser.params.gradient_sums import LEFT, with_sum
from te_fuser.presets.keyword_arguments import (
    OPTIONS,
    SETTLED,
    ClassSignature,
    Common,
    Fill,
    PlacementArguments,
    RandomState,
    check_flag,
    check_positions,
    default_device,
    signature_of,
    taken,
)
from te_fuser.recipe.region import microbatch
from te_fuser.sequential import Sequential
from te_fuser.variants import Variants

if TYPE_CHECKING:
    from te_fuser.fuser.plan.plan import Plan
    from te_fuser.fuser.tune.tune import TuneReport

Shared = TypeVar("Shared", bound=ops.Cut)
Made = TypeVar("Made", bound="Preset")


@dataclass(frozen=True)
class Declared:
    """Initial value of a preset's parameter, and the attributes that it carries for others to read."""

    fill: Fill | float
    marks: dict[str, Any]


_NOTHING: dict[str, Any] = {}  # beside x; nobody writes to it


class Asked(NamedTuple):
    """Call of a preset, as the call of a list that it comes to.

    Attributes:
        listed: the list that it takes: the preset itself or a variant.
        call: named inputs, and `outputs`.
        held: what it runs in.
        returns: the bias that the call returns behind the output, in its dtype, or None; empty: it returns none.
        again: whether backward keeps the input alone and computes the rest again.
    """

    listed: Sequential
    x: torch.Tensor
    call: dict[str, Any] = _NOTHING
    held: contextlib.AbstractContextManager[None] | None = None
    returns: tuple[torch.Tensor | None, ...] = ()
    again: bool = False
    is_first_microbatch: bool | None = None

    def of_list(self, way: Callable[..., Any]) -> Any:
        """Return way(list, x, **call), run in `held` and by `is_first_microbatch`."""
        if self.held is None and self.is_first_microbatch is None:
            return way(self.listed, self.x, **self.call)
        with microbatch(self.is_first_microbatch), self.held or contextlib.nullcontext():
            return way(self.listed, self.x, **self.call)

    def by(self, way: Callable[..., Any]) -> Any:
        """The call's result, where `way` gives that of the list."""
        made = self.of_list(way)
        if not self.returns:
            return made
        out, *others = made if isinstance(made, tuple) else (made,)
        bias = self.returns[0]
        return (out, bias if bias is None or bias.dtype == out.dtype else bias.to(out.dtype), *others)

    def run(self) -> Any:
        """The call's result."""
        if not self.again:
            return self.by(Sequential.forward)
        return self.by(lambda listed, x, **call: checkpoint(functools.partial(Sequential.forward, listed), x, **call))


def understands(forward: Callable[..., Asked]) -> Callable[..., Any]:
    """The forward of a preset, of a function that gives its `Asked` and runs nothing."""

    @functools.wraps(forward)
    def run(self: Preset, *args: Any, **call: Any) -> Any:
        asked = forward(self, *args, **call)
        return Sequential.forward(asked.listed, asked.x) if asked.call is _NOTHING else asked.run()

    vars(run)["asked"] = forward
    return run


class Preset(Together, Variants):
    """A list of ops over parameters of its own, which a call turns into x, named inputs and outputs.

    A constructor makes parameters by `declare`, then `reset_parameters`, then fills the list by `relist`, whose ops
    are those of `variant_ops()` without arguments. A forward that `understands` begins with `check_group`, and `answer`
    picks a variant. `reference`, `plan`, `plans`, `explain` and `tune` take what calls take.

    Attributes:
        arguments: the class of what the constructor takes as keywords, beside options of lists.
        common: an object of it; the group of ranks is `tp_group`.

    Raises:
        TypeError: for an unknown keyword, naming the nearest; for more by position than the constructor takes so.
        NotImplementedError: for a value that asks for what is missing.
        AttributeError: when what its ops have is to be changed later.
    """

    flattens = True
    arguments: ClassVar[type[PlacementArguments]] = Common
    common: Any
    _listed: frozenset[str] = frozenset()  # names of the ops of the list
    __signature__: ClassVar[ClassSignature]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__signature__ = ClassSignature(signature_of(cls, cls.arguments))  # who looks for `device` finds it

    def __new__(cls: type[Made], *args: Any, **keywords: Any) -> Made:
        check_positions(cls, args)
        return super().__new__(cls)

    def __init__(self, **keywords: Any) -> None:
        options = {name: keywords.pop(name) for name in OPTIONS if name in keywords}
        common = taken(type(self), self.arguments, keywords)
        super().__init__(**options)
        self.common = replace(common, tp_group=None)  # which no pickle takes
        self.sequence_parallel = bool(common.sequence_parallel)
        self.fuse_wgrad_accumulation = bool(getattr(common, "fuse_wgrad_accumulation", False))
        self.delay_wgrad_compute = bool(getattr(common, "delay_wgrad_compute", False))
        self._declared: dict[str, Declared] = {}
        self.sequence_dim = common.sequence_dim
        self._group = _group(common.tp_group)
        self.tp_size = common.tp_size if common.tp_group is None else self._group.size
        if common.tp_size not in (1, self.tp_size):
            raise ValueError(f"tp_size={common.tp_size}, but tp_group has {self.tp_size} ranks: leave tp_size out")
        self._refusal = self._why_not()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in SETTLED and (name in self.__dict__ or self._listed):
            settled = self.__dict__.get(name, getattr(self.__dict__.get("common"), name, value))
            if settled != value:
                raise AttributeError(
                    f"{type(self).__name__}: {name} is settled when it is made ({settled!r}), and calls would not "
                    f"follow {value!r}; make another one, which may share its parameters"
                )
        super().__setattr__(name, value)

    def keywords(self, arguments: type[PlacementArguments] = Common, **changed: Any) -> dict[str, Any]:
        """Keywords of these arguments as this preset was given them, for its parts that are presets themselves."""
        common = {f.name: getattr(self.common, f.name) for f in fields(arguments)}
        group = None if self._group == ops.Group() else self._group
        placed = {"tp_group": group, "tp_size": self.tp_size, "sequence_dim": self.sequence_dim}
        return {**common, **placed, **changed}

    # ---------------------------------------------------------------------------------- parameters

    def declare(self, name: str, shape: Iterable[int] | None, fill: Fill | float, **marks: Any) -> None:
        """Make a parameter; `reset_parameters` fills it.

        Args:
            shape: None for one that there is not: as torch.nn's, a preset says None of it.
            fill: a function that is called with it, or a number.
            **marks: attributes that it carries, however it is moved, copied or loaded: see `cut` and `whole`.
        """
        if shape is None:
            return self.register_parameter(name, None)
        made = torch.empty(*shape, dtype=self.common.params_dtype, device=default_device(self.common.device))
        self.register_parameter(name, torch.nn.Parameter(made))
        self._declared[name] = Declared(fill, marks)

    def share(self, size: int, name: str = "size") -> int:
        """A rank's share of a size that ranks cut. ValueError when it cannot be cut so."""
        if size % self.tp_size:
            raise ValueError(f"{name}={size} cannot be cut into {self.tp_size} equal parts (tp_size): change one")
        return size // self.tp_size

    def whole(self) -> dict[str, Any]:
        """The marks of a parameter that every rank has as a whole.

        Its gradient is added up over the ranks where these have terms of it, and nobody has to do so once more.
        """
        return {LEFT: False, **cut(0, False)}

    def mark(self, name: str, **marks: Any) -> None:
        """Give a parameter more attributes, which it carries as those that it was declared with."""
        declared = self._declared[name]
        self._declared[name] = replace(declared, marks={**declared.marks, **marks})
        self._parameters[name].__dict__.update(marks)

    def returned_terms(self) -> tuple[str, ...]:
        """Biases that calls return, of whose gradients each rank of the group has a term."""
        return ()

    def returned(self, bias: torch.Tensor | None, mode: str | None) -> torch.Tensor | None:
        """A bias that a call returns in place of adding it, behind a product that ranks share so.

        Who adds it to rows that ranks cut has a term of its gradient, which is added up over them.
        """
        is_term = bias is not None and self.sequence_parallel and mode != "column"
        return with_sum(bias, self._group) if bias is not None and is_term else bias

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill parameters anew, weights in the tracker's random state."""
        if defer_init:
            return
        self.reset_scales()
        for name, declared in self._declared.items():
            parameter = self._parameters.get(name)
            if parameter is None:
                continue
            with torch.no_grad():
                if callable(declared.fill):
                    state = RandomState.of(self.common)
                    with contextlib.nullcontext() if state is None or parameter.is_meta else state():
                        filled(self, name, declared.fill)
                else:
                    parameter.fill_(declared.fill)
        self._settle()

    def _settle(self) -> None:
        super()._settle()
        for name, declared in self._declared.items():
            parameter = self._parameters.get(name)
            if parameter is not None:
                parameter.__dict__.update(declared.marks)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        if f"{prefix}_extra_state" in state_dict:
            del state_dict[f"{prefix}_extra_state"]  # of a copy, which each module of a load gets
            if _last_load[0] is not rest[-1]:  # once in a load, which has one list of errors for all modules
                _last_load[0] = rest[-1]
                words = "a checkpoint's _extra_state is skipped: these modules keep nothing there"
                warnings.warn(words, stacklevel=3)
        super()._load_from_state_dict(state_dict, prefix, *rest)

    # --------------------------------------------------------------------------------------- lists

    def named_ops(self, **how: Any) -> Iterable[tuple[str, torch.nn.Module]]:
        """The ops of `variant_ops`, by the names that they have in this list."""
        return ((str(n), op) for n, op in enumerate(self.variant_ops(**how)))

    def relist(self) -> None:
        """Fill the list with the ops of a call that changes nothing, in the mode of those before; others stay."""
        found = dict(self.named_ops())
        for name, op in found.items():
            before = self._modules.get(name)
            if op is not before:
                op.train(self.training if before is None else before.training)
        others = {name: m for name, m in self._modules.items() if name not in {*found, *self._listed}}
        self._modules.clear()
        appended = {name: others.pop(name) for name in [*others] if name.isdecimal()}
        self._modules.update({**others, **found, **appended})
        self._listed = frozenset(found)
        said = SETTLED.intersection(vars(self.common)).difference(dir(type(self)))
        vars(self).update({name: getattr(self.common, name) for name in said if name not in vars(self)})

    def members(self) -> Iterable[tuple[str, torch.nn.Module]]:
        """Members of the list: those that `relist` put there, or their replacements, and those appended.

        A module that is assigned to a name of its own is no op of the list, as in modules that are no lists.
        """
        gone = [name for name in self._listed if self._modules.get(name) is None]
        if gone:
            raise AttributeError(
                f"{type(self).__name__} has no {gone[0]!r} any more: put te_fuser.ops.Identity() there"
            )
        return ((name, m) for name, m in super().members() if name in self._listed or name.isdecimal())

    def own_ops(self) -> list[torch.nn.Module]:
        """Members that `relist` put into the list, or their replacements."""
        return [module for name, module in self.members() if name in self._listed]

    def appended(self) -> Iterable[torch.nn.Module]:
        return [module for name, module in self.members() if name not in self._listed]

    def reference(self, *args: Any, **call: Any) -> Any:
        """Result of the same call, op by op, in plain differentiable PyTorch operations."""
        return self._asked(*args, **call).by(Sequential.reference)

    def plan(self, *args: Any, device: Any = None, **call: Any) -> Plan:
        """Plan of the same call, as `Sequential.plan`."""
        return self._asked(*args, **call).of_list(functools.partial(Sequential.plan, device=device))  # type: ignore[no-any-return]

    def plans(self, *args: Any, device: Any = None, **call: Any) -> list[Plan]:
        """Plans of the same call, as `Sequential.plans`."""
        return self._asked(*args, **call).of_list(functools.partial(Sequential.plans, device=device))  # type: ignore[no-any-return]

    def explain(
        self, *args: Any, device: str | None = None, source: bool = False, measure: bool = False, passes: bool = False,
        details: bool = False, **call: Any,
    ) -> Any:  # fmt: skip
        """Both plans of the same call as tables, as `Sequential.explain` shows them, with its options."""
        how = functools.partial(
            Sequential.explain, device=device, source=source, measure=measure, passes=passes, details=details
        )
        return self._asked(*args, **call).of_list(how)

    def tune(self, *args: Any, rounds: int = 7, seconds: float = 0.2, margin: float = 0.005, **call: Any) -> TuneReport:
        """Measure alternatives for the same call, as `Sequential.tune`, with its options."""
        measure = functools.partial(Sequential.tune, rounds=rounds, seconds=seconds, margin=margin)
        return self._asked(*args, **call).of_list(measure)  # type: ignore[no-any-return]

    def _asked(self, *args: Any, **call: Any) -> Asked:
        """The list's call that a preset's call comes to, whatever a subclass does around it."""
        forwards = (vars(kind).get("forward") for kind in type(self).__mro__)
        return next(vars(f)["asked"] for f in forwards if f and "asked" in vars(f))(self, *args, **call)  # type: ignore[no-any-return]

    def plan_ahead(self, x: torch.Tensor, **call: Any) -> None:
        """Plan and compile for calls like this one, of which nothing runs; not where calls are refused as yet."""

        def prepare(listed: Sequential, x: torch.Tensor, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> None:
            parts = listed._prepared()
            if len(parts) == 1 and isinstance(parts[0], FusedRegion):  # with hooks for all modules every op is a part
                parts[0].fuser.prepare(x, inputs, listed._wanted(outputs))

        if not (x.is_meta or self._refusal):
            self._asked(x, **call).of_list(prepare)

    def answer(
        self,
        how: dict[str, Any],
        x: torch.Tensor,
        call: dict[str, Any],
        is_first_microbatch: bool | None = None,
        bias: torch.Tensor | None = None,
        held: contextlib.AbstractContextManager[None] | None = None,
    ) -> Asked:
        """A call of the variant that `how` says, of the list itself if empty; with `return_bias` it returns `bias`.

        One of a first micro-batch writes gradients of weights over their main_grad, where there is one: `over`.
        """
        own = vars(self)
        if check_flag("is_first_microbatch", is_first_microbatch) and self.fuse_wgrad_accumulation:
            how = {**how, "over": True}
        listed, again = self.variant(**how) if how else self, own.get("checkpoint", False)
        returns, asked = (bias,) if own.get("return_bias") else (), self.asked()
        call = {**call, "outputs": (*asked, *call.get("outputs", ()))} if asked else call
        return Asked(listed, x, call, held, returns, again, is_first_microbatch)

    def product(
        self, in_features: int, out_features: int, mode: str | None = None, overwrite_main_grad: bool = False
    ) -> ops.MatMul:
        """A product to be bound to a weight; `mode` is how ranks share it, see `ops.Cut`."""
        made = ops.MatMul(
            in_features,
            out_features,
            accumulate_into_main_grad=self.fuse_wgrad_accumulation,
            overwrite_main_grad=overwrite_main_grad,
            delay_wgrad_compute=self.delay_wgrad_compute,
            device="meta",
        )
        return self.shared(made, mode)

    def product_as(self, other: ops.MatMul, overwrite_main_grad: bool) -> ops.MatMul:
        """A product like another one."""
        made = self.product(other.in_features, other.out_features, overwrite_main_grad=overwrite_main_grad)
        return made.shared_as(other)

    def bias_op(self, features: int, mode: str | None = None) -> ops.Bias:
        """A bias to be bound, shared by ranks as a product of that mode gives rows."""
        return self.shared(ops.Bias(features, device="meta"), mode)

    def shared(self, op: Shared, mode: str | None = None) -> Shared:
        """The op, shared by the ranks of the group."""
        op.parallel_mode, op.group = mode, self._group
        op.sequence_parallel, op.sequence_dim = self.sequence_parallel, self.sequence_dim
        return op

    def writing_over(self, op: torch.nn.Module) -> torch.nn.Module:
        """An op of this list; for a product that adds to main_grad one that writes over it."""
        if not (isinstance(op, ops.Bound) and isinstance(op.op, ops.MatMul) and op.op.accumulate_into_main_grad):
            return op
        return ops.Bound(self.product_as(op.op, overwrite_main_grad=True), op.owner, **op.names)

    @property
    def is_list(self) -> bool:
        """True where a call with x alone is one of the bare list, whose output is the preset's."""
        return not self.asked()

    def asked(self) -> tuple[str, ...]:
        """The named outputs that each call returns."""
        return ()

    def beside(self) -> tuple[str, ...]:
        """The arguments by which calls return more than one value."""
        return tuple(name for name in _BESIDE if getattr(self.common, name, False))

    def check_nested(self, path: str) -> None:
        self.check_group()
        self.check_one_value(f"{path!r} of a list")

    def check_one_value(self, where: str) -> None:
        """Refuse to stand where calls take and return one tensor, naming what changes it."""
        if self.beside():
            raise TypeError(
                f"{where}: {type(self).__name__} returns several values, by {' and '.join(self.beside())}, where one "
                "is taken: make it without, or call it by itself"
            )

    # -------------------------------------------------------------------------------------- groups

    @property
    def tp_group(self) -> Any:
        """The group of ranks that share the weights, as torch.distributed knows it; None where none was given."""
        return None if self._group == ops.Group() else self._group.process_group()

    def set_tensor_parallel_group(self, tp_group: Any) -> None:
        """Give this preset and those in it their group of ranks. TypeError when it is none."""
        group = _group(tp_group)
        for module in self.modules():
            if isinstance(module, Preset):
                module._group = group
                module._refusal = module._why_not()
                module._made_from = []  # variants are made anew
            if isinstance(module, ops.Bound) and isinstance(module.op, ops.Cut) and isinstance(module.owner, Preset):
                module.op.group = group
            if isinstance(module, ops.Collective):
                module.group = group
            if isinstance(module, FusableOperation):
                module.revision += 1  # lists around look at the preset again

    def check_group(self) -> None:
        """Raise where this preset has not the group of ranks that it was made for. RuntimeError, saying what to do."""
        if self._refusal:
            raise RuntimeError(f"{type(self).__name__}: {self._refusal}")

    def _why_not(self) -> str:
        ranks = self._group.size
        if ranks == self.tp_size:
            return ""
        if self._group == ops.Group():
            return f"tp_size={self.tp_size} takes a group: call set_tensor_parallel_group(group), or leave tp_size at 1"
        return f"it was made for tp_size={self.tp_size}, its tp_group has {ranks} ranks: make it with tp_size={ranks}"


def _group(given: Any) -> ops.Group:
    """The ranks of a group, by default this process alone."""
    try:
        return ops.Group() if given is None else ops.Group.of("tp_group", given)
    except TypeError as error:
        raise TypeError(f"tp_group is a group of torch.distributed's, got {given!r}: use new_group(ranks)") from error


_BESIDE = ("return_bias", "return_layernorm_output")
_last_load: list[Any] = [None]


def cut(dim: int, is_cut: bool = True) -> dict[str, Any]:
    """Marks of a parameter that ranks cut along a dimension, for Megatron."""
    return {"tensor_model_parallel": is_cut, "partition_dim": dim if is_cut else -1, "partition_stride": 1}


class TorchOp(torch.nn.Module):
    """An op in torch's functions; `as_ops` gives the op back."""

    def __init__(self, op: ops.FusableOperation) -> None:
        super().__init__()
        self._op = (op,)  # no child: it has no state

    def as_ops(self, convert: Callable[[str, torch.nn.Module], torch.nn.Module]) -> ops.FusableOperation:
        """The op."""
        return self._op[0]

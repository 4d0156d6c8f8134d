"""Operations: an op is a module that is one step of a model, owns its parameters, and says its meaning.

Row operations give a formula (`row_op.RowOp`); opaque ones give a forward and gradients on tensors
(`operations.UnfusedOperation`). Neither knows how it will be fused or on what it will run.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
import torch.nn.utils.parametrize

from te_fuser.formula import random
from te_fuser.formula.expr import Axes
from te_fuser.guards import Facts
from te_fuser.ops.checks import TakesArguments
from te_fuser.ops.sizes import Size, exact, rounded_up
from te_fuser.params.binding import Binding, PlannedParametrizations
from te_fuser.record import record

Op = TypeVar("Op", bound="FusableOperation")
# Members that features' tables took over -> the decorator that gives a class its row.
_MOVED = {
    **dict.fromkeys(("autocast", "wide_parameters"), "@autocast_policy(...) of te_fuser.ops.autocast"),
    **dict.fromkeys(("example", "prototype", "prototype_arguments", "other_choices"), "@example of te_fuser.verify"),
    "by_torch": "@torch_function(...) of te_fuser.ops.tensor_function",
    **dict.fromkeys(("spread", "takes_spread", "of_rank", "each_rank"), "@sharding_rule(...) of te_fuser.parallel"),
    **{
        name: f"@op_table.{name}.row(...) of te_fuser.ops"
        for name in ("exports", "idles_without", "hands_through", "global_state", "gradient_dtype")
    },
}


@dataclass(frozen=True)
class NamedInput:
    """Extra input of an op: its name in the call or in a `Fork`, and the axes that it has.

    `axes` FULL: the shape of x; ROWS: [..., 1]; SAMPLE_FEATURES: [samples, features]; BATCH: [samples]; FEATURE:
    [features]; NONE: []; None: any shape (opaque ops only). With `gradient=False` no gradient flows to it.
    """

    name: str
    axes: Axes | None = Axes.FULL
    optional: bool = False
    gradient: bool = True


@record()
class Spec:
    """Shape, dtype and device of a tensor while planning; sizes may note questions."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @functools.cached_property
    def key(self) -> Hashable:
        """Key equal for specs of all shapes that a plan may hold for; it asks nothing of sizes."""
        return tuple([s.text if isinstance(s, Size) else s for s in self.shape]), self.dtype, self.device

    @property
    def features(self) -> int:
        """The size of the last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """The product of the other dimensions."""
        return math.prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes that all elements take."""
        return self.rows * self.features * self.dtype.itemsize

    def with_features(self, features: int) -> Spec:
        """Spec of the same rows with another feature size."""
        return Spec((*self.shape[:-1], features), self.dtype, self.device)

    def exact(self) -> Spec:
        """Spec in plain numbers."""
        return self._seen(exact)

    def rounded(self) -> Spec:
        """Spec as prices see it, in plain numbers."""
        return self._seen(rounded_up)

    def _seen(self, view: Callable[[int], int]) -> Spec:
        plain = {*map(type, self.shape)} <= {int}
        return self if plain else Spec(tuple(map(view, self.shape)), self.dtype, self.device)


@dataclass(frozen=True)
class Gradient:
    """One node of an op's backward: what it produces, what it reads, and the method that computes it.

    `produces` names "input", parameters and the method takes (call, dy) and returns {name: gradient}
    (one that nobody needs may be missing or None). `reads` names "input", "output", parameters,
    named inputs and names the forward emits; what a forward did not read needs no naming. A node of a fusion may
    produce the gradient of a value inside the match, too, "0.d_output", for another to read. `work` is its matrix
    products' operations over those of forward; None: forward's for each gradient that is needed. `by_attributes` names
    parameters whose attributes (main_grad) say where their gradient goes: the method gets the parameters themselves.
    Where `wait` names a second method, the first only starts something, and the second takes (call, what that gave) and
    gives the gradients: other steps may run in between. A node that is `delayed` is left to `backward_dw`.
    """

    produces: tuple[str, ...]
    reads: tuple[str, ...]
    method: str
    work: float | None = None
    by_attributes: tuple[str, ...] = ()
    wait: str | None = None
    delayed: bool = False

    @property
    def takes(self) -> tuple[str, ...]:
        """Names that the function of a fusion's node takes: dy, and what it reads."""
        instead = any(name.startswith("dy.") or name.endswith(".d_output") for name in self.reads)
        return self.reads if instead else ("dy", *self.reads)


@dataclass
class OpCall:
    """One call of an opaque op: tensors by name, the gradients that are needed, its draws' stream."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    random: random.RandomStream | None = None
    emitted: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)  # what forward tells backward that is no tensor
    fresh: bool = False  # whether a reference makes numbers of its call where it quantizes, and puts them into tensors
    stored: dict[str, torch.dtype] = field(default_factory=dict)  # of outputs that a reference gives in a wider one
    transport: Any = None  # what moves tensors between ranks; None: the ProcessGroup

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.tensors.get(name)
        if found is None:
            raise KeyError(f"{name!r} is not among what this op reads ({sorted(self.tensors)}); declare it in `reads`")
        return found

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor `name`, or None when it was not given."""
        return self.tensors.get(name)

    def needs(self, name: str) -> bool:
        """True where somebody needs the gradient of `name`."""
        return name in self.needed

    def emit(self, name: str, tensor: torch.Tensor) -> None:
        """Give a value that backward reads beside input and output."""
        self.emitted[name] = tensor


@record()
class LoweredOp:
    """An op with parameters and place; `aside` are bindings of what a pass puts there."""

    op: FusableOperation
    bindings: Mapping[str, Binding]
    suffix: str = ""
    places: tuple[Place, ...] = ()  # in the fused operations that it comes from, the outermost first
    aside: Mapping[str, Binding] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Whole:
    """A fused operation in its place in a list, as patterns see it."""

    kind: type[FusableOperation]


@dataclass(frozen=True)
class Place:
    """Position of an elementary op among the `count` of a fused operation."""

    whole: Whole
    index: int
    count: int


class FusableOperation(TakesArguments, torch.nn.Module):
    """Base class of all ops; derive your own from `RowOp` or `UnfusedOperation`.

    Patterns of fusions match an op's `kind`, its class. A subclass is a kind of its own, since its formula may differ,
    unless it sets `kind` to another class; a wrapper class of fully_shard or register_parametrization keeps the kind. A
    base class with `family = True` matches all of its subclasses.
    """

    kind: ClassVar[type[FusableOperation]]
    role: ClassVar[str]  # what plans and kernels call it and its tensors; by default the class's name in snake case
    family: ClassVar[bool] = True  # of this class alone: a subclass is a family only where it says so too
    emits: ClassVar[tuple[str, ...]] = ()  # what an opaque op's forward gives its backward
    writes: ClassVar[tuple[str, ...]] = ()  # named inputs that an opaque op's forward writes into
    views: ClassVar[str] = ""  # "input", or a named input: it moves nothing, its output is a view of that
    values: ClassVar[tuple[str, ...]] = ()  # named outputs that are values of their own: it gives all by name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in filter(_MOVED.__contains__, cls.__dict__):
            raise TypeError(f"{cls.__name__}.{name} is not read any more: put {_MOVED[name]} above the class")
        parametrized = cls.__module__ == torch.nn.utils.parametrize.__name__  # register_parametrization made the class
        if "kind" not in cls.__dict__ and issubclass(cls.__bases__[0], FusableOperation) and not parametrized:
            cls.kind = cls
        cls.family = cls.__dict__.get("family", False)
        if "role" not in cls.__dict__:
            cls.role = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", cls.__name__).lower()

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "revision", 0)

    def __setattr__(self, name: str, value: Any) -> None:
        same = _keeps_shape(self, name, value)
        super().__setattr__(name, value)
        # A changed attribute (eps, p, a parameter of another shape) is a changed op: plans made before no longer hold.
        if name != "training" and not same:
            revise(self)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        revise(self)

    def register_parameter(self, name: str, param: torch.nn.Parameter | None) -> None:
        """Register a parameter as torch.nn.Module does."""
        same = _keeps_shape(self, name, param)
        super().register_parameter(name, param)
        if not same:
            revise(self)

    def __getattr__(self, name: str) -> Any:
        if name == "parametrizations":
            planned = PlannedParametrizations.of(self)
            if planned is not None:
                return planned
        if "_modules" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__}: its __init__ must first call super().__init__()")
        return super().__getattr__(name)

    def with_attributes(self: Op, **attributes: Any) -> Op:
        """Copy of this op over the same parameters, with other attributes."""
        made = object.__new__(type(self))
        object.__setattr__(made, "__dict__", {**self.__dict__, **attributes})
        return made

    def facts(self) -> Facts:
        """Guards on this op; when one fails, plans and lists with the op are made anew."""
        return Facts(items=((self.__dict__, "revision", self.revision),))

    def forward(self, x: torch.Tensor, *, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """Run this op alone, by a cached plan; with `outputs`, names among its own, (y, *outputs)."""
        from te_fuser.fuser.pipeline import run_alone  # which knows ops, and not the other way round

        return run_alone(self, x, inputs, outputs)

    def lower(self) -> list[LoweredOp]:
        """Elementary ops that this one stands for, with their paths."""
        return [LoweredOp(self, {name: Binding(self, name) for name in self.parameter_names()})]

    def parameter_names(self) -> tuple[str, ...]:
        """Names of the op's parameters, also of those that torch.nn.utils.parametrize computes."""
        own = [name for name, p in self._parameters.items() if p is not None]
        return (*own, *self.__dict__["_modules"].get("parametrizations", ()))

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """{argument: `NamedInput`} of the tensors that the op reads by name."""
        return {}

    def named_outputs(self) -> tuple[str, ...]:
        """Names of its output and `values`, for later ops (Fork) or for the caller (Output)."""
        return self.values

    def infer(self, x: Spec) -> Spec | Mapping[str, Spec]:
        """Shape, dtype and device of the output; with `values` it may be a dict, {"output": Spec, name: Spec}.

        Raises:
            ValueError: when the op cannot take x; the message says what it got and what it takes.
        """
        return x

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec | Mapping[str, Spec]:
        """Spec of the output given those of named inputs, {argument: Spec}; by default `infer(x)`."""
        return self.infer(x)

    def named_output(self, name: str, out: Spec) -> Spec:
        """Spec of a named output, where the main one's is `out`: by default the same, under another name.

        With another dtype it is another form of the same value: both are rounded once, from what the formula gives.
        """
        return out

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        """Check the named inputs, {argument: Spec}, before anything runs; by default all are accepted.

        Raises:
            TypeError, ValueError: when one is missing or cannot be taken; the message names it and says what to do.
        """

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes that parameters must have, {name: shape}, where no formula says it."""
        return {}

    def draws(self) -> bool:
        """True where this op draws random numbers as it is now (training or not)."""
        return False

    def batch_dim(self) -> int | None:
        """Dimension of x that counts samples, for an op that works per sample; None for others."""
        return None

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        """Floating-point operations of its matrix products in forward (0 for row ops)."""
        return 0.0

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        """Output in differentiable PyTorch operations, for any dtype; with `values`, a dict of all by name."""
        raise NotImplementedError(f"{type(self).__name__} gives no reference")

    def extra_repr(self) -> str:
        hidden = ("training", "revision")
        plain = {k: v for k, v in vars(self).items() if isinstance(v, (int, float, str, bool)) and k not in hidden}
        return ", ".join(f"{k}={v}" for k, v in plain.items() if not k.startswith("_"))


def _keeps_shape(op: FusableOperation, name: str, value: Any) -> bool:
    # What is behind a parameter may change at every call (fully_shard): only its shape belongs to the op.
    old = op.__dict__.get("_parameters", {}).get(name)
    return old is not None and isinstance(value, torch.Tensor) and old.shape == value.shape


def revise(op: FusableOperation) -> None:
    """Count a change of an op, which ends the plans that were made with it."""
    op.__dict__["revision"] = op.__dict__.get("revision", 0) + 1


def output_specs(op: FusableOperation, x: Spec, inputs: Mapping[str, Spec] | None = None) -> dict[str, Spec]:
    """Specs of "output" and the named outputs, by infer_from() or named_output()."""
    said = op.infer_from(x, inputs or {})
    given = {**said} if isinstance(said, Mapping) else {"output": said}
    if "output" not in given:
        raise TypeError(f'infer() gives {", ".join(given)} and no output: it is named "output"')
    return given | {n: op.named_output(n, given["output"]) for n in op.named_outputs() if n not in given}


def outputs_by_name(op: FusableOperation, made: Any, who: str) -> Mapping[str, Any]:
    """Results of an op, given by `who`, by name: "output" and `values`, no others."""
    found = made if isinstance(made, Mapping) else {"output": made}
    if found.keys() != {"output", *op.values}:
        gives, all_of = (", ".join(map(str, names)) for names in (found, ("output", *op.values)))
        raise TypeError(f"{who} gives {gives}, but by `values` it is to give {all_of}: return a dict of these")
    return found


def walk(module: torch.nn.Module) -> Iterator[FusableOperation]:
    """Every op below a module, itself included."""
    for m in module.modules():
        if isinstance(m, FusableOperation):
            yield m

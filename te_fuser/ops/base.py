"""What an operation is: a module that is one step of a model, owns its parameters, and says its meaning.

Row operations give a formula (`RowOp.compute`); opaque ones give a forward and gradients on tensors
(`UnfusedOperation`). Neither knows how it will be fused or on what it will run.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.utils.parametrize

from te_fuser.formula import expr, random
from te_fuser.formula.expr import Axes
from te_fuser.ops.binding import Binding, PlannedParametrizations, has_tensor
from te_fuser.ops.checks import check_features, check_floating
from te_fuser.ops.parameters import alike, of_kind, randomized
from te_fuser.ops.rows import as_rows, batch_layout, parameter_axes, rounds, whole
from te_fuser.ops.sizes import exact, rounded_up


@dataclass(frozen=True)
class NamedInput:
    """An extra input of an op: the name it has in the call or in a Fork, and the axes it extends over.

    `axes` FULL: the shape of x; ROWS: [..., 1]; SAMPLE_FEATURES: [samples, features]; BATCH: [samples];
    FEATURE: [features]; NONE: [];
    None: whatever the tensor is, handed over as it is (opaque ops only). `gradient` says whether one may flow to it.
    """

    name: str
    axes: Axes | None = Axes.FULL
    optional: bool = False
    gradient: bool = True


@dataclass(frozen=True)
class Spec:
    """What is known of a tensor while planning: shape, dtype, device.

    Sizes that depend on a call may note what is asked of them (`ops.sizes`).
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def features(self) -> int:
        """The size of the last dimension; 1 for a scalar."""
        return self.shape[-1] if self.shape else 1

    @property
    def rows(self) -> int:
        """The product of the other dimensions."""
        return math.prod(self.shape[:-1])

    def with_features(self, features: int) -> Spec:
        """The same rows with another feature size."""
        return Spec((*self.shape[:-1], features), self.dtype, self.device)

    def exact(self) -> Spec:
        """The same in plain numbers."""
        return Spec(tuple(map(exact, self.shape)), self.dtype, self.device)

    def rounded(self) -> Spec:
        """The same as prices see it: in plain numbers, those of a call rounded up to the grid."""
        return Spec(tuple(map(rounded_up, self.shape)), self.dtype, self.device)


@dataclass(frozen=True)
class Gradient:
    """One node of an op's backward: what it produces, what it reads, and the method that computes it.

    `produces` names "input", parameters and the method takes (call, dy) and returns {name: gradient}
    (one that nobody needs may be missing or None). `reads` names "input", "output", parameters,
    named inputs and names the forward emits; what a forward did not read needs no naming. `work` is its matrix
    products' operations over those of forward; None: forward's for each gradient that is needed. `by_attributes` names
    parameters whose attributes (main_grad) say where their gradient goes: the method gets the parameters themselves.
    Where `wait` names a second method, the first only starts something, and the second takes (call, what that gave) and
    gives the gradients: other steps may run in between.
    """

    produces: tuple[str, ...]
    reads: tuple[str, ...]
    method: str
    work: float | None = None
    by_attributes: tuple[str, ...] = ()
    wait: str | None = None


@dataclass
class OpCall:
    """What an opaque op sees of one call: tensors by name, which gradients are needed, where its draws come from."""

    tensors: dict[str, torch.Tensor | None] = field(default_factory=dict)
    needed: frozenset[str] = frozenset()
    random: random.RandomStream | None = None
    emitted: dict[str, torch.Tensor] = field(default_factory=dict)
    notes: dict[str, object] = field(default_factory=dict)  # what forward tells backward that is no tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        found = self.tensors.get(name)
        if found is None:
            raise KeyError(f"{name!r} is not among what this op reads ({sorted(self.tensors)}); declare it in `reads`")
        return found

    def get(self, name: str) -> torch.Tensor | None:
        """The tensor `name`, or None when it was not given."""
        return self.tensors.get(name)

    def needs(self, name: str) -> bool:
        """Whether somebody needs the gradient of `name`."""
        return name in self.needed

    def emit(self, name: str, tensor: torch.Tensor) -> None:
        """Give a value that backward reads beside input and output."""
        self.emitted[name] = tensor


@dataclass(frozen=True)
class LoweredOp:
    """An op as the planner sees it: the op, the parameters it reads, and its place in the module tree."""

    op: FusableOperation
    bindings: Mapping[str, Binding]
    suffix: str = ""
    places: tuple[Place, ...] = ()  # in the fused operations that it comes from, the outermost first


@dataclass(frozen=True)
class Place:
    """Which of a fused operation's `count` elementary ops one is."""

    whole: FusableOperation
    index: int
    count: int


class FusableOperation(torch.nn.Module):
    """One step of a model that the fuser can plan; see `RowOp` and `UnfusedOperation` for how to write one.

    `kind` is what patterns match. A subclass is a kind of its own unless it sets `kind` to another's, since its formula
    may be another; a class put before an op's (by fully_shard, register_parametrization) leaves the kind as it is.
    A class that leaves part of its meaning to subclasses says `family = True`: in a pattern it stands for all of them.
    """

    kind: ClassVar[type[FusableOperation]]
    role: ClassVar[str]  # what plans and kernels call it and its tensors; by default the class's name in snake case
    family: ClassVar[bool] = True  # of this class alone: a subclass is a family only where it says so too
    run_alone: ClassVar[Callable[..., Any]]  # set by the fuser, which ops do not know
    # Under torch.autocast: "lower" casts x and parameters down, "float32" x up; "follow" takes x as it comes, and where
    # that is in the lower dtype, as after a product, fusions read float32 parameters in it too; formulas need not.
    autocast: ClassVar[str | None] = None
    make_cast: ClassVar[Callable[[torch.dtype], FusableOperation]]  # what autocast puts in front; set by ops.cast
    global_state: ClassVar[Callable[[], Hashable] | None] = None  # PyTorch's switches that plans of this op look at
    exports: ClassVar[bool] = False  # whether its named outputs go to the caller rather than to later ops
    emits: ClassVar[tuple[str, ...]] = ()  # what an opaque op's forward gives its backward
    wide_parameters: ClassVar[tuple[str, ...]] = ()  # that an opaque op takes in float32 whatever its input is
    views: ClassVar[bool] = False  # whether it moves nothing: its output is its input's memory
    idles: ClassVar[bool] = False  # whether it gives x as it is in a call that gives none of its named inputs
    values: ClassVar[tuple[str, ...]] = ()  # named outputs that are values of their own: it gives all by name
    other_choices: ClassVar[Mapping[str, str]] = {}  # argument -> a value that is not its default, for verify to try
    by_torch: ClassVar[Callable[..., Any] | None] = None  # f(self, x, names) -> `TorchFunction`; of this class alone
    prototype_arguments: ClassVar[Mapping[str, Any]] = {}  # argument -> what verify gives where it gives nothing else

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
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
        # What is behind a parameter may change at every call (fully_shard): only its shape belongs to the op.
        old = self.__dict__.get("_parameters", {}).get(name)
        same = old is not None and isinstance(value, torch.Tensor) and old.shape == value.shape
        super().__setattr__(name, value)
        # A changed attribute (eps, p, a parameter of another shape) is a changed op: plans made before no longer hold.
        if name != "training" and not same:
            self.__dict__["revision"] = self.__dict__.get("revision", 0) + 1

    def __getattr__(self, name: str) -> Any:
        if name == "parametrizations":
            planned = PlannedParametrizations.of(self)
            if planned is not None:
                return planned
        return super().__getattr__(name)

    def forward(self, x: torch.Tensor, *, outputs: Sequence[str] = (), **inputs: torch.Tensor) -> Any:
        """Run this op alone, by a cached plan; with `outputs`, names among its own, (y, *outputs)."""
        return type(self).run_alone(self, x, inputs, outputs)

    def lower(self) -> list[LoweredOp]:
        """The elementary ops this one stands for."""
        return [LoweredOp(self, {name: Binding(self, name) for name in self.parameter_names()})]

    def parameter_names(self) -> tuple[str, ...]:
        """The parameters that are there, those included that torch.nn.utils.parametrize computes."""
        own = [name for name, p in self._parameters.items() if p is not None]
        return (*own, *self.__dict__["_modules"].get("parametrizations", ()))

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """Argument name -> the named tensor it reads."""
        return {}

    def named_outputs(self) -> tuple[str, ...]:
        """Names this op gives to its output and to its `values`, for later ops (Fork) or for the caller (Output)."""
        return self.values

    def infer(self, x: Spec) -> Spec | Mapping[str, Spec]:
        """The output's shape and dtype; an op with `values` may say {"output": its, name: that of a value}.

        Raises:
            ValueError: when the op cannot take x; the message says what it got and what it takes.
        """
        return x

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec | Mapping[str, Spec]:
        """The same, where named inputs (argument -> what is known of it) have a say in it; by default `infer(x)`."""
        return self.infer(x)

    def specs(self, x: Spec, inputs: Mapping[str, Spec] | None = None) -> dict[str, Spec]:
        """What all outputs are, "output" and the named ones: as infer_from() says, else as named_output() does."""
        said = self.infer_from(x, inputs or {})
        given = {**said} if isinstance(said, Mapping) else {"output": said}
        if "output" not in given:
            raise TypeError(f'infer() gives {", ".join(given)} and no output: it is named "output"')
        return given | {n: self.named_output(n, given["output"]) for n in self.named_outputs() if n not in given}

    def named_output(self, name: str, out: Spec) -> Spec:
        """What a named output is, where the main one is `out`: by default the same, under another name.

        With another dtype it is another form of the same value: both are rounded once, from what the formula gives.
        """
        return out

    def reading(self, x: Spec) -> str:
        """How it reads x where that can be taken for something else, with the sizes, for `explain`; mostly empty."""
        return ""

    def gradient_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which it gives the gradient of an input of `dtype`."""
        return dtype

    def check_inputs(self, x: Spec, inputs: Mapping[str, Spec]) -> None:
        """Look at the extra inputs (argument name -> what is known of it) before anything runs; by default all pass.

        Raises:
            TypeError, ValueError: when one is missing or cannot be taken; the message names it and says what to do.
        """

    def marked_parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Which of these bound parameters have attributes that say where their gradient goes."""
        return ()

    def parameter_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes that parameters must have, where no formula says it."""
        return {}

    def draws(self) -> bool:
        """Whether this op draws random numbers as it is now (training or not)."""
        return False

    def batch_dim(self) -> int | None:
        """The dimension of x that counts samples, for an op that works per sample."""
        return None

    def flops(self, x: Spec, parameters: Mapping[str, Spec]) -> float:
        """Floating-point operations of its matrix products in forward (0 for row ops)."""
        return 0.0

    def scratch_bytes(self, x: Spec) -> int:
        """Bytes of intermediate results that the op's own forward writes and reads again."""
        return 0

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        """The meaning in differentiable PyTorch operations, whatever the dtype; with `values`, of all by name."""
        raise NotImplementedError(f"{type(self).__name__} gives no reference")

    def references(self, call: OpCall, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """The same for all outputs: "output", and the named ones."""
        made = self.given_by(self.reference(call, x), "its reference")
        return {**dict.fromkeys(self.named_outputs(), made["output"]), **made}

    def given_by(self, made: Any, who: str) -> Mapping[str, Any]:
        """What `who` gave, by the names that it has among this op's outputs.

        Raises:
            TypeError: when these are not "output" and those of `values`.
        """
        found = made if isinstance(made, Mapping) else {"output": made}
        if found.keys() != {"output", *self.values}:
            gives, all_of = (", ".join(map(str, names)) for names in (found, ("output", *self.values)))
            raise TypeError(f"{who} gives {gives}, but by `values` it is to give {all_of}: return a dict of these")
        return found

    @classmethod
    def prototype(cls, features: int, name: str, **changed: Any) -> FusableOperation:
        """An op of this kind, for verify: `changed` has another value of an argument, and `name` is a free one.

        By default the constructor gets these, `prototype_arguments`, and its `features` and `name`.
        """
        return of_kind(cls, features, name, {**cls.prototype_arguments, **changed})

    def example(self, features: int, rng: torch.Generator) -> FusableOperation:
        """An op like this one for `features` input features, for verify, the fuzzer and the benchmark.

        By default the constructor gets the attributes that are called as its arguments are, and parameters random
        numbers where it takes a device.
        """
        made = alike(self, features)
        return randomized(made, rng) if any(p.is_meta for p in made.parameters()) else made

    def extra_repr(self) -> str:
        hidden = ("training", "revision")
        plain = {k: v for k, v in vars(self).items() if isinstance(v, (int, float, str, bool)) and k not in hidden}
        return ", ".join(f"{k}={v}" for k, v in plain.items() if not k.startswith("_"))


class RowOp(FusableOperation):
    """An op that is pointwise or reduces over the features of a row: it is given by its formula.

    `compute(self, x, ...)` is written with `te_fuser.formula`; its further arguments are parameters and extra inputs
    by name. On tensors (rows of features) it is the reference, on symbols it gives gradient and kernels.
    """

    family = True
    inputs: ClassVar[Mapping[str, NamedInput]] = {}
    promotes: ClassVar[bool] = False  # whether a wider dtype of a named input is the output's too, as in x + other
    sized: ClassVar[bool] = False  # whether it is made for inputs of so many `features`, where these are no None

    def compute(self, x: Any, *args: Any) -> Any:
        """The formula."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self, x, ...)")

    def arguments(self) -> tuple[str, ...]:
        """The names of compute's arguments after x.

        Raises:
            TypeError: when there is no formula, or an argument that is neither a tensor's name nor `name=None`.
        """
        return tuple(_arguments(type(self).compute, type(self).__name__))

    def required(self) -> tuple[str, ...]:
        """Those of `arguments` that must be there."""
        found = _arguments(type(self).compute, type(self).__name__)
        return tuple([name for name, optional in found.items() if not optional])

    def parameter_names(self) -> tuple[str, ...]:
        """The arguments of compute that are tensors of this op: parameters, buffers, computed ones."""
        return tuple([name for name in self.arguments() if has_tensor(self, name)])

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """By default every argument of compute that is no parameter is an extra input of that name."""
        return {
            name: self.inputs.get(name, NamedInput(name))
            for name in self.arguments()
            if name not in self._parameters and name not in self.parameter_names()
        }

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype of the output for an input of `dtype`."""
        return dtype

    def result_dtype(self, x: torch.dtype, named: Iterable[torch.dtype]) -> torch.dtype:
        """The dtype of the output, the named inputs considered."""
        return functools.reduce(torch.promote_types, named if self.promotes else (), self.output_dtype(x))

    def infer(self, x: Spec) -> Spec:
        """The rows of x with as many features as the formula gives, the dtype that `output_dtype` says.

        Raises:
            TypeError: when x holds no floating-point numbers.
            ValueError: when x has other features than the op was made for.
        """
        features = getattr(self, "features", None) if self.sized else None
        if features is not None:
            check_features(self, x, features)
        check_floating(x)
        shape = (*x.shape[:-1], self._width(x.features)) if x.shape else ()
        return Spec(shape, self.output_dtype(x.dtype), x.device)

    def _width(self, features: int) -> int:
        """How many features the formula gives for so many; as many, where it cannot be read (planning says why)."""
        given = self.named_inputs()
        arguments = [self._symbol(name, given.get(name), features) for name in self.arguments()]
        try:
            made = self.compute(expr.leaf("x", Axes.FULL, features), *arguments)
            y = expr.lift(self.given_by(made, "compute()")["output"])
        except (ValueError, TypeError, AttributeError):
            return features
        return y.width if y.axes & Axes.FEATURE else features

    def _symbol(self, name: str, given: NamedInput | None, features: int) -> expr.Expr | None:
        """An argument of compute as a symbol, as far as the op alone knows it."""
        tensor = getattr(self, name, None)
        if isinstance(tensor, torch.Tensor):
            return expr.leaf(name, parameter_axes(tensor.shape), tensor.numel())
        return None if given is None else expr.leaf(name, Axes.FULL if given.axes is None else given.axes, features)

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """compute() on rows: inputs raised to float32 (float64 stays), one rounding at the output."""
        return self.references(call, x)["output"]

    def references(self, call: OpCall, x: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = (x.reshape(-1, x.shape[-1]) if x.dim() else x.reshape(1, 1)).to(wide)
        given = self.named_inputs()
        axes = {name: g.axes for name, g in given.items()}
        stream = call.random or random.RandomStream(0, 0, 0, *batch_layout(x.shape, self.batch_dim()))
        tensors = {name: call.get(name) for name in self.arguments()}
        arguments = [t if t is None else as_rows(t.to(wide), axes.get(n), rows, stream) for n, t in tensors.items()]
        # Where nothing is drawn, a compiler that traces this sees plain operations alone.
        with random.using(stream) if self.draws() else contextlib.nullcontext():
            made = self.given_by(self.compute(rows, *arguments), "compute()")
        named = [tensor.dtype for name in given if (tensor := call.get(name)) is not None]
        main = whole(made["output"], rows)
        out = Spec((*x.shape[:-1], main.shape[-1]), self.result_dtype(x.dtype, named), x.device)
        specs = {"output": out, **{name: self.named_output(name, out) for name in self.named_outputs()}}
        exact = x.dtype == torch.float64 and not rounds()
        found = {name: whole(made[name], rows) if name in self.values else main for name in specs}
        return {
            name: y.to(x.dtype if exact else specs[name].dtype).reshape(*x.shape[:-1], y.shape[-1])
            for name, y in found.items()
        }


@functools.lru_cache(1024)
def _arguments(compute: Callable[..., Any], op: str) -> Mapping[str, bool]:
    """The names of a formula's arguments after self and x, and whether they may be None."""
    if compute is RowOp.compute:
        raise TypeError(f"{op} has no formula: define compute(self, x, ...)")
    _, _, *others = inspect.signature(compute).parameters.values()
    for p in others:
        if p.kind is not p.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{op}.compute takes {p}: its arguments after x are tensors, each by its name")
        if p.default not in (p.empty, None):
            raise TypeError(
                f"{op}.compute takes {p}: what is no tensor is an attribute of the op, read as self.{p.name}"
            )
    return {p.name: p.default is None for p in others}


class UnfusedOperation(FusableOperation):
    """An op with its own forward and gradients on tensors.

    Write `op_forward(call, x)` and `op_backward(call, dy)`, which returns dx or (dx, {name: gradient}); `reads` names
    what op_backward reads, `emits` what op_forward gives it by `call.emit`. An op whose gradients can run apart
    lists them in `gradients` instead. With `values` it gives all outputs by name, and each node of its backward has the
    gradient of a value as `call.get("d_name")`: None, as dy itself, where nobody gives one.
    """

    family = True
    reads: ClassVar[tuple[str, ...]] = ("input",)
    # op_wait(call, started) -> the output, of an op whose op_forward only starts something: others may run in between.
    op_wait: ClassVar[Callable[..., Any] | None] = None
    input_dtypes: ClassVar[tuple[torch.dtype, ...]] = ()  # that it takes for x beside those that row ops take
    takes_gradients_in: ClassVar[tuple[torch.dtype, ...]] = ()  # of its outputs, beside these outputs' own dtypes
    non_differentiable: ClassVar[tuple[str, ...]] = ()  # its outputs that have no gradient, beside those of integers

    def emitted_bytes(self, x: Spec) -> Mapping[str, int]:
        """The bytes of each of `emits`, for the plan; what is missing counts as none."""
        return {}

    def explicit_bytes(self, x: Spec, inputs: Mapping[str, Spec]) -> int:
        """The bytes of the largest intermediate result of its own forward that a library's kernel would not have."""
        return 0

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """The nodes of the backward; `names` are the parameters and named inputs that are bound."""
        return (Gradient(("input", *names), self.reads, "whole_backward"),)

    def marked_parameters(self, names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple([name for gradient in self.gradients(names) for name in gradient.by_attributes])

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        """The output for x; with `values`, {"output": y, name: z, ...}."""
        raise NotImplementedError(f"{type(self).__name__} must define op_forward(self, call, x)")

    def op_backward(self, call: OpCall, dy: Any) -> Any:
        """dx, or (dx, {name: gradient})."""
        raise NotImplementedError(f"{type(self).__name__} must define op_backward(self, call, dy)")

    def whole_backward(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """op_backward as one node of the graph."""
        result = self.op_backward(call, dy)
        dx, others = result if isinstance(result, tuple) else (result, {})
        return {"input": dx, **others}

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        """op_forward, recorded by autograd: so verify checks op_backward against it."""
        started = self.op_forward(call, x)
        return started if self.op_wait is None else self.op_wait(call, started)

    def references(self, call: OpCall, x: torch.Tensor) -> dict[str, torch.Tensor]:
        made = super().references(call, x)
        return {name: y.detach() if name in self.non_differentiable else y for name, y in made.items()}


def walk(module: torch.nn.Module) -> Iterator[FusableOperation]:
    """Every op below a module, itself included."""
    for m in module.modules():
        if isinstance(m, FusableOperation):
            yield m

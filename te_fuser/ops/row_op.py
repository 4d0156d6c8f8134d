"""Ops that are pointwise or reduce over the features of a row, given by a formula."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from te_fuser.dtypes import FLOAT8
from te_fuser.formula import expr, quantize, random
from te_fuser.formula.evaluate import as_rows, batch_layout, parameter_axes, rounds, whole
from te_fuser.formula.expr import Axes
from te_fuser.ops.base import FusableOperation, NamedInput, OpCall, Spec, outputs_by_name
from te_fuser.ops.checks import check_features, check_floating
from te_fuser.params.binding import has_tensor
from te_fuser.recipe.recipes import OwnScales

_SOME = 64  # features, where a formula tells by none how many there are


class RowOp(FusableOperation):
    """An op that computes each row (the features of one token) independently, by a formula.

    `compute(self, x, ...)` is written with `te_fuser.formula`; its further arguments are parameters and extra inputs by
    name. Evaluated on tensors it is the reference; evaluated on symbols it gives the gradient and the kernels.

    Examples:
        >>> from te_fuser.formula import tanh
        >>> from te_fuser.ops import RowOp
        >>> class SoftCap(RowOp):
        ...     def compute(self, x):
        ...         return 30.0 * tanh(x / 30.0)
    """

    family = True
    inputs: ClassVar[Mapping[str, NamedInput]] = {}
    promotes: ClassVar[bool] = False  # whether a wider dtype of a named input is the output's too, as in x + other
    # Bound, a float32 [] of this name is raised to the largest magnitude of x, or of what comes back for the output.
    raised_in_forward: ClassVar[str] = ""
    raised_in_backward: ClassVar[str] = ""
    # Bound, the same is raised by a pass before the kernel, and `scale` and `inverse` follow as `own_scale` says.
    measured_in_forward: ClassVar[str] = ""
    measured_in_backward: ClassVar[str] = ""
    sized: ClassVar[bool] = False  # whether it is made for inputs of so many `features`, where these are no None

    def compute(self, x: Any, *args: Any) -> Any:
        """The formula."""
        raise NotImplementedError(f"{type(self).__name__} must define compute(self, x, ...)")

    def own_scale(self) -> tuple[torch.dtype, OwnScales] | None:
        """Dtype and rule of an output in 8 bits whose scale follows from that output; None for other ops."""
        return None

    def arguments(self) -> tuple[str, ...]:
        """The names of compute's arguments after x."""
        return tuple(_arguments(type(self).compute, type(self).__name__))

    def required(self) -> tuple[str, ...]:
        """Names of the `arguments` that must be there."""
        found = _arguments(type(self).compute, type(self).__name__)
        return tuple([name for name, optional in found.items() if not optional])

    def parameter_names(self) -> tuple[str, ...]:
        """The arguments of compute that are tensors of this op: parameters, buffers, computed ones."""
        return tuple([name for name in self.arguments() if has_tensor(self, name)])

    def named_inputs(self) -> Mapping[str, NamedInput]:
        """Extra inputs: by default every argument of compute that is no parameter, under its name."""
        return {
            name: self.inputs.get(name, NamedInput(name))
            for name in self.arguments()
            if name not in self._parameters and name not in self.parameter_names()
        }

    def output_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype of the output for an input of `dtype`; by default the same."""
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

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec | Mapping[str, Spec]:
        """Spec as of infer(); where a formula `promotes`, in the widest dtype of all that it adds."""
        said = self.infer(x)
        if not self.promotes:
            return said
        dtype = self.result_dtype(x.dtype, [s.dtype for s in inputs.values()])
        given = said if isinstance(said, Mapping) else {"output": said}
        return {name: replace(spec, dtype=dtype) if name == "output" else spec for name, spec in given.items()}

    def _width(self, features: int) -> int:
        """Features that the formula gives for so many; as many where it cannot be read."""
        y = self.on_symbols(features).get("output")
        return features if y is None or not y.axes & Axes.FEATURE else y.width

    def on_symbols(
        self, features: int | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None
    ) -> dict[str, expr.Expr]:
        """Expressions that the formula makes of symbols, by output; none, where it cannot be read (planning says why).

        Args:
            features: the number that x has; None: as many as the longest of the parameters.
            shapes: of parameters, where the op itself does not hold them.
        """
        given, shapes = self.named_inputs(), shapes or {}
        if features is None:
            features = max([n for shape in shapes.values() if (n := math.prod(shape)) > 1], default=_SOME)
        arguments = [
            expr.leaf(name, parameter_axes(shapes[name]), math.prod(shapes[name]))
            if name in shapes
            else self._symbol(name, given.get(name), features)
            for name in self.arguments()
        ]
        try:
            made = self.compute(expr.leaf("x", Axes.FULL, features), *arguments)
            return {name: expr.lift(y) for name, y in outputs_by_name(self, made, "compute()").items()}
        except (ValueError, TypeError, AttributeError):
            return {}

    def _symbol(self, name: str, given: NamedInput | None, features: int) -> expr.Expr | None:
        """An argument of compute as a symbol, as far as the op alone knows it."""
        tensor = getattr(self, name, None)
        if isinstance(tensor, torch.Tensor):
            return expr.leaf(name, parameter_axes(tensor.shape), tensor.numel())
        return None if given is None else expr.leaf(name, Axes.FULL if given.axes is None else given.axes, features)

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor | dict[str, torch.Tensor]:
        """compute() on rows: inputs raised to float32 (float64 stays), one rounding at the output.

        What is stored in 8 bits comes as float32 that holds these numbers (`OpCall.stored`). With `values`, or a named
        output in another dtype, it gives all by name.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rows = (x.flatten(0, -2) if x.dim() > 1 else x.reshape(1, -1)).to(wide)
        given = self.named_inputs()
        axes = {name: g.axes for name, g in given.items()}
        stream = call.random or random.RandomStream(0, 0, 0, *batch_layout(x.shape, self.batch_dim()))
        tensors = {name: call.get(name) for name in self.arguments()}
        arguments = [t if t is None else as_rows(t.to(wide), axes.get(n), rows, stream) for n, t in tensors.items()]
        # Where nothing is drawn, a compiler that traces this sees plain operations alone.
        with random.using(stream) if self.draws() else contextlib.nullcontext():
            made = outputs_by_name(self, self.compute(rows, *arguments), "compute()")
        named = [tensor.dtype for name in given if (tensor := call.get(name)) is not None]
        main = whole(made["output"], rows)
        out = Spec((*x.shape[:-1], main.shape[-1]), self.result_dtype(x.dtype, named), x.device)
        specs = {"output": out, **{name: self.named_output(name, out) for name in self.named_outputs()}}
        exact = x.dtype == torch.float64 and not rounds()
        found = {name: whole(made[name], rows) if name in self.values else main for name in specs}
        dtypes = {name: x.dtype if exact else spec.dtype for name, spec in specs.items()}
        # autograd would round gradients of 8 bits, too: what is stored so stays wide on its way.
        call.stored.update({name: dtype for name, dtype in dtypes.items() if dtype in FLOAT8.values()})
        made = {
            name: (quantize(y, 1.0, dtypes[name]) if name in call.stored else y.to(dtypes[name])).reshape(
                *x.shape[:-1], y.shape[-1]
            )
            for name, y in found.items()
        }
        return made if self.values or len({*dtypes.values()}) > 1 else made["output"]


@functools.lru_cache(1024)
def _arguments(compute: Callable[..., Any], op: str) -> Mapping[str, bool]:
    """The names of a formula's arguments after self and x, and whether they may be None."""
    if compute is RowOp.compute:
        raise TypeError(f"{op} has no formula: define compute(self, x, ...)")
    _, *taken = inspect.signature(compute).parameters.values()
    if not taken:
        raise TypeError(f"{op}.compute takes no x: define compute(self, x, ...)")
    others = taken[1:]
    for p in others:
        if p.kind is not p.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{op}.compute takes {p}: its arguments after x are tensors, each by its name")
        if p.default not in (p.empty, None):
            raise TypeError(
                f"{op}.compute takes {p}: what is no tensor is an attribute of the op, read as self.{p.name}"
            )
    return {p.name: p.default is None for p in others}

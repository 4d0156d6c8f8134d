"""Checks that refuse parameters, named inputs and ops that do not fit, each with the op's name and what to do."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from te_fuser.dtypes import FLOATING, STORED, text_of
from te_fuser.formula.expr import Axes
from te_fuser.ops.autocast import AUTOCAST
from te_fuser.ops.base import FusableOperation, NamedInput, Spec
from te_fuser.ops.checks import check_floating as refuse_integers
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.row_op import RowOp

if TYPE_CHECKING:
    from te_fuser.fuser.graph.op_instances import ListedOp, ParameterSpecs
    from te_fuser.params.binding import Binding

# What an op lists -> what each of it is.
_SEQUENCES: dict[str, type] = {
    "values": str,
    "emits": str,
    "reads": str,
    "non_differentiable": str,
    "input_dtypes": torch.dtype,
    "takes_gradients_in": torch.dtype,
}


def plain(name: str) -> str:
    """A name as users gave it, without the path of its list."""
    return name.rsplit("/", 1)[-1]


def check_parameters(label: str, x: Spec, listed: ListedOp, given: Mapping[str, ParameterSpecs]) -> None:
    """Refuse parameters that are not there, are no plain tensors, or do not fit the op or its input."""
    op = listed.lowered.op
    shapes = op.parameter_shapes()
    for name in (*shapes, *(op.required() if isinstance(op, RowOp) else ())):
        if name not in given and name in op._parameters:
            raise ValueError(f"{label}: parameter {name} is None, and the op computes with it; give it a tensor")
    for name, known in given.items():
        kind, spec = known.kind, known.spec
        # isinstance() would call a parameter made of a DTensor a plain one too.
        if known.lies is None and kind is not torch.Tensor and torch.nn.Parameter not in kind.__mro__:
            raise TypeError(
                f"{label}: parameter {name} is a {kind.__name__}; te_fuser runs plain tensors and "
                "DTensors: make it one of these"
            )
        shape = shapes.get(name, spec.shape)
        if spec.shape != shape:
            raise ValueError(
                f"{label}: parameter {name} has shape {list(spec.shape)}, the op was made for {list(shape)}; "
                "make a new op for another size"
            )
        if spec.device != x.device:
            raise ValueError(
                f"{label}: parameter {name} is on {spec.device}, its input on {x.device}; move one with .to()"
            )
        if name in listed.casts or spec.dtype == x.dtype or x.dtype not in FLOATING.values():
            continue
        narrow = x.dtype in (torch.bfloat16, torch.float16) and spec.dtype == torch.float32
        if not (narrow and (isinstance(op, RowOp) or name in AUTOCAST.of(type(op)).wide_parameters)):
            raise TypeError(
                f"{label}: parameter {name} is {text_of(spec.dtype)}, its input {text_of(x.dtype)}; convert the input "
                f"with .to({spec.dtype}), or the model with .to({x.dtype})"
            )


def check_named(label: str, name: str, given: NamedInput, x: Spec, spec: Spec, batch_dim: int | None) -> None:
    if spec.device != x.device:
        raise ValueError(
            f"{label}: {plain(name)!r} is on {spec.device}, the main input on {x.device}; move one with .to()"
        )
    if given.axes is None:
        return
    check_floating(f"{label}, input {plain(name)!r}", spec)
    if torch.promote_types(x.dtype, spec.dtype) not in (x.dtype, spec.dtype) or _is_double(x) != _is_double(spec):
        raise TypeError(
            f"{label}: {plain(name)!r} is {text_of(spec.dtype)}, the main input {text_of(x.dtype)}; "
            "convert one with .to()"
        )
    if given.axes == Axes.FULL and spec.shape != x.shape:
        raise ValueError(
            f"{label}: {plain(name)!r} has shape {list(spec.shape)}, the main input {list(x.shape)}; they must be equal"
        )
    if given.axes == Axes.FULL:
        return
    if given.axes & Axes.BATCH and not given.axes & Axes.OUTER and batch_dim is None:
        raise ValueError(f"{label}: {plain(name)!r} is given per sample; the op must say batch_dim()")
    samples = x.shape[batch_dim] if batch_dim is not None else 1
    features = spec.shape[-1] if spec.shape else 1
    wanted = {
        Axes.ROWS: (*x.shape[:-1], 1),
        Axes.SAMPLE_FEATURES: (samples, features),
        Axes.BATCH: (samples,),
        Axes.FEATURE: (features,),
        Axes.NONE: (),
    }[given.axes]
    if given.axes == Axes.NONE and math.prod(spec.shape) == 1:
        return
    if spec.shape != wanted:
        raise ValueError(
            f"{label}: {plain(name)!r} has shape {list(spec.shape)}, needs {list(wanted)} for an input of shape "
            f"{list(x.shape)}"
        )


def check_outputs(label: str, op: FusableOperation, specs: Mapping[str, Spec]) -> None:
    for name in ("output", *op.named_outputs()):
        spec = specs[name]
        if not isinstance(spec, Spec):
            said = "infer()" if name == "output" else f"named_output({name!r})"
            raise TypeError(f"{label}: {said} gives a {type(spec).__name__}; return a Spec")
    unknown = [name for name in specs if name != "output" and name not in op.named_outputs()]
    if unknown:
        raise ValueError(f"{label}: infer() says what {unknown[0]!r} is, which is none of its `values`")
    if not isinstance(op, RowOp):
        return
    out = specs["output"]
    check_dtype(f"{label}: output_dtype()", out.dtype)
    for name in op.named_outputs():
        form = specs[name]
        shape = (*out.shape[:-1], form.features) if name in op.values else out.shape
        check_dtype(f"{label}: named_output({name!r})", form.dtype)
        if form.shape != shape:
            raise ValueError(f"{label}: named_output({name!r}) has shape {list(form.shape)}, it needs {list(shape)}")


def check_dtype(who: str, dtype: torch.dtype) -> None:
    """Refuse a dtype that no value is stored in, where an op gives it."""
    if dtype not in STORED.values():
        raise TypeError(f"{who} gives {text_of(dtype)}; it can be {', '.join(STORED)}")


def _is_double(spec: Spec) -> bool:
    return spec.dtype == torch.float64


def check_kind(label: str, op: FusableOperation, bindings: Mapping[str, Binding]) -> None:
    """Refuse an op that says of itself what cannot be."""
    for said, kind in _SEQUENCES.items():
        _check_sequence(label, f"`{said}`", getattr(op, said, ()), kind)
    _check_names(label, op, bindings)
    if isinstance(op, RowOp):
        return
    if not isinstance(op, UnfusedOperation):
        raise TypeError(
            f"{label}: an op is a RowOp (it has a formula) or an UnfusedOperation (it has its own forward and "
            "backward), or lower() gives such ops; this one is neither"
        )
    unknown = [name for name in op.non_differentiable if name not in ("output", *op.values)]
    if unknown:
        raise ValueError(f"{label}: non_differentiable names {unknown[0]!r}, which is none of its outputs")
    _check_gradients(label, op, bindings)


def _check_sequence(label: str, said: str, given: Any, kind: type) -> None:
    """Refuse one name or dtype where several are listed; a text would be taken letter by letter."""
    if isinstance(given, kind):
        raise TypeError(f"{label}: {said} is a sequence, got {given!r}; write ({given!r},)")
    wrong = [one for one in given if not isinstance(one, kind)]
    if wrong:
        raise TypeError(f"{label}: {said} holds {wrong[0]!r}, which is no {kind.__name__}")


def _check_gradients(label: str, op: UnfusedOperation, bindings: Mapping[str, Binding]) -> None:
    """Refuse nodes of a backward that name what there is not, or that give one gradient twice."""
    own = {"input", *op._parameters, *bindings, *op.named_inputs()}
    known = {"reads": own | {"output", *op.emits, *op.values}, "produces": own}
    produced: set[str] = set()
    for gradient in op.gradients((*bindings, *op.named_inputs())):
        for what, names in known.items():
            _check_sequence(label, f"`{what}` of its Gradient", getattr(gradient, what), str)
            wrong = [name for name in getattr(gradient, what) if name not in names]
            if wrong:
                hint = "; what its forward gives by call.emit it lists in `emits`" if what == "reads" else ""
                raise ValueError(
                    f"{label}: its backward {what} {wrong[0]!r}, which is none of {', '.join(sorted(names))}{hint}"
                )
        twice = produced.intersection(gradient.produces)
        if twice:
            raise ValueError(f"{label}: two nodes of its backward produce {min(twice)!r}; let one of them give it")
        produced.update(gradient.produces)
    if not produced and "output" not in op.non_differentiable:
        raise ValueError(
            f'{label}: its gradients() lists none, so nothing before it would get one; list "input" in a Gradient, or '
            'say that its output has none: non_differentiable = ("output",)'
        )


def check_some_features(label: str, op: FusableOperation, x: Spec) -> None:
    """Refuse rows without features, where a formula is to be computed on them."""
    if isinstance(op, RowOp) and x.features == 0:
        raise ValueError(
            f"{label}: takes at least 1 feature, got an input of shape {list(x.shape)}; leave it out there"
        )


def _check_names(label: str, op: FusableOperation, bindings: Mapping[str, Binding]) -> None:
    outputs = op.named_outputs()
    unnamed = [name for name in op.values if name not in outputs]
    if unnamed:
        raise TypeError(f"{label}: named_outputs() leaves out {unnamed[0]!r} of its `values`; it gives all names")
    if not isinstance(op, RowOp) and len(outputs) > len(op.values):
        raise TypeError(
            f"{label}: only a RowOp names its output; put Fork or Output behind this op, or list in `values` what is "
            "a value of its own"
        )
    taken = {"input", "output", "dy", "seed", *bindings, *op.named_inputs(), *op.emits}
    twice = [name for name in op.values if name in taken or op.values.count(name) > 1]
    if twice:
        raise ValueError(f"{label}: {twice[0]!r} in its `values` is another tensor's name too; give it one of its own")


def check_input(label: str, op: FusableOperation, spec: Spec) -> None:
    """Refuse a main input in a dtype that an op does not take."""
    if not isinstance(op, UnfusedOperation) or spec.dtype not in op.input_dtypes:
        check_floating(label, spec)


def check_floating(label: str, spec: Spec) -> None:
    """Refuse dtypes that no value may have."""
    if spec.dtype.is_floating_point and spec.dtype not in FLOATING.values():
        raise TypeError(f"{label}: takes {', '.join(FLOATING)}, got {text_of(spec.dtype)}; convert with .bfloat16()")
    refuse_integers(spec, f"{label}: takes")

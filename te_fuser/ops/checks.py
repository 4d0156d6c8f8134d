"""Checks of the arguments and inputs of ops, with one wording for all."""

from __future__ import annotations

import functools
import keyword
import math
import operator
from collections.abc import Callable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

import torch

from te_fuser.dtypes import TABLE, text_of
from te_fuser.ops.words import described

if TYPE_CHECKING:
    from te_fuser.ops.base import FusableOperation, Spec

_TAKEN = ("self", "x", "outputs")

_P = ParamSpec("_P")


def feature_size(features: int | Sequence[int], name: str = "features") -> int:
    """The size of the last dimension from an int or a sequence of one, as torch.nn takes it.

    Raises:
        ValueError: for more than one dimension, or a negative size.
        TypeError: for anything but whole numbers.
    """
    sizes = tuple(features) if isinstance(features, (tuple, list, torch.Size)) else (features,)
    if not all(isinstance(size, int) and not isinstance(size, bool) for size in sizes):
        raise TypeError(f"{name} is a whole number, got {features!r}")
    if len(sizes) != 1:
        raise ValueError(f"{name} is the size of the last dimension alone, got {list(sizes)}: flatten the others first")
    if sizes[0] < 0:
        raise ValueError(f"{name} is a size, got {sizes[0]}")
    return sizes[0]


def may_look(device: torch.device) -> bool:
    """True where an op may look at values to refuse them: on a CPU, where no compiler or exporter traces it."""
    return device.type == "cpu" and not torch.compiler.is_compiling()


def check_floating(x: Spec, takes: str = "te_fuser ops take") -> None:
    """Refuse integers and booleans.

    Raises:
        TypeError: when x holds no floating-point numbers.
    """
    if not x.dtype.is_floating_point:
        may_be_ids = not x.dtype.is_complex and x.dtype != torch.bool
        ids = "put a torch.nn.Embedding before it where these are ids of tokens, else " if may_be_ids else ""
        raise TypeError(f"{takes} floating-point tensors, got {text_of(x.dtype)}: {ids}convert with .float()")


def must_say(
    **choices: str,
) -> Callable[[Callable[Concatenate[Any, _P], None]], Callable[Concatenate[Any, _P], None]]:
    """Decorator of a constructor with keywords without a default: the error for a missing one says the choices."""

    def around(init: Callable[Concatenate[Any, _P], None]) -> Callable[Concatenate[Any, _P], None]:
        @functools.wraps(init)
        def checked(self: Any, /, *args: _P.args, **given: _P.kwargs) -> None:
            missing = [f"give {name}={words}" for name, words in choices.items() if name not in given]
            if missing:
                raise TypeError(f"{type(self).__name__} has to be told: {'; '.join(missing)}")
            init(self, *args, **given)

        checked.says = choices  # type: ignore[attr-defined]
        return checked

    return around


def check_features(op: FusableOperation, x: Spec, features: int) -> None:
    """Refuse an input whose last dimension is not `features`.

    Raises:
        ValueError: naming both sizes.
    """
    name = type(op).__name__
    if not x.shape:
        raise ValueError(f"{name} takes [..., {features}], got a scalar")
    if x.features != features:
        raise ValueError(
            f"{name} was made for {features} features, got {x.features} (input shape {list(x.shape)}): "
            f"give it [..., {features}] or make it with {x.features}"
        )


def check_probability(p: float, name: str | None = None) -> float:
    """A drop probability as a float; `name` is what the caller calls it.

    Raises:
        ValueError: when it is not in [0, 1].
        TypeError: when it is no number.
    """
    what = "a drop probability" if name is None else f"{name}, a drop probability,"
    if not isinstance(p, (int, float)):
        raise TypeError(f"{what} is a number in [0, 1], got {p!r}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"{what} lies in [0, 1], got {p}")
    return float(p)


def check_eps(op: FusableOperation, eps: float) -> float:
    """Check the number that a norm adds so as not to divide by 0, and return it.

    Raises:
        ValueError: when it is no finite number from 0 on.
        TypeError: when it is no number.
    """
    found = real_number(type(op).__name__, "eps", eps)
    if not 0.0 <= found < math.inf:
        raise ValueError(f"{type(op).__name__}: eps is a small number, such as 1e-5, got {eps!r}")
    return found


def real_number(op: str, name: str, value: Any) -> float:
    """An argument of an op that is a number.

    Raises:
        TypeError: when it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{op} takes a number as {name}, got {value!r}")
    return float(value)


def finite_number(op: str, name: str, value: Any) -> float:
    """An argument of an op that is a number, neither infinite nor NaN.

    Raises:
        TypeError: when it is no number.
        ValueError: when it is one of those.
    """
    found = real_number(op, name, value)
    if not math.isfinite(found):
        raise ValueError(f"{op} takes a finite number as {name}, got {value}")
    return found


def whole_number(op: str, name: str, value: int) -> int:
    """An argument of an op that is a whole number.

    Raises:
        TypeError: when it is none.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{op} takes a whole number as {name}, got {value!r}")
    return operator.index(value)


def count(op: str, name: str, value: int, least: int = 1) -> int:
    """An argument of an op that counts something.

    Raises:
        TypeError: when it is no whole number.
        ValueError: when it is less than `least`.
    """
    found = whole_number(op, name, value)
    if found < least:
        raise ValueError(f"{op} takes a whole number from {least} on as {name}, got {value}")
    return found


def yes_or_no(op: str, name: str, value: bool) -> bool:
    """An argument of an op that is True or False.

    Raises:
        TypeError: when it is neither.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{op} takes True or False as {name}, got {described(value)}")
    return value


def function_or_none(op: str, name: str, value: Any) -> Any:
    """An argument of an op that is a function, where it is given.

    Raises:
        TypeError: when it is none.
    """
    if not (value is None or callable(value)):
        raise TypeError(f"{op} takes a function as {name}, or None, got {value!r}")
    return value


def check_last(op: FusableOperation, dim: int) -> None:
    """Take the `dim` that torch.nn's module of that name has, where it is the last one.

    Raises:
        ValueError: when it is another.
    """
    if dim != -1:
        name = type(op).__name__
        raise ValueError(
            f"{name} goes over the features of each row, dim=-1, got dim={dim!r}: put torch.nn.{name}({dim!r}) into "
            "the list, which runs by itself"
        )


def check_batch_dim(op: FusableOperation, x: Spec, batch_dim: int) -> None:
    """Refuse an input without that dimension, or whose features it is.

    Raises:
        ValueError: naming the dimension and the shape.
    """
    dims = len(x.shape)
    if not -dims <= batch_dim < dims - 1 or batch_dim == -1:
        raise ValueError(
            f"{type(op).__name__} counts samples along dimension {batch_dim}, which is no dimension before the "
            f"features of an input of shape {list(x.shape)}: give batch_dim in [0, {max(dims - 2, 0)}]"
        )


def check_name(name: str) -> str:
    """A name that a call can give as a keyword.

    Raises:
        ValueError: when it cannot be one.
    """
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        raise ValueError(f"a name must be usable as a keyword argument, like 'skip'; got {name!r}")
    if name in _TAKEN:
        raise ValueError(f"{name!r} is an argument of every call, model(x, outputs=...): choose another name")
    return name


def check_parameters_dtype(name: str, dtype: Any) -> None:
    """Refuse what is no dtype for parameters, under the argument's name; None is torch's default.

    Raises:
        TypeError: saying what to write.
    """
    if not (dtype is None or isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        use = f"torch.{dtype}" if str(dtype) in TABLE else "torch.bfloat16, say"
        raise TypeError(f"{name} is a floating-point dtype of torch's, got {dtype!r}: use {use}")


def resolve_shape(shape: Sequence[int], elements: int) -> tuple[int, ...]:
    """`shape` with its -1, if it has one, replaced so that it holds that many elements.

    Raises:
        ValueError: when no size does.
    """
    known = math.prod(size for size in shape if size != -1)
    if -1 not in shape:
        if known != elements:
            raise ValueError(f"shape {list(shape)} holds {known} elements, got {elements}")
        return tuple(shape)
    if not known or elements % known:
        raise ValueError(f"no size in place of -1 makes shape {list(shape)} hold {elements} elements")
    return tuple(elements // known if size == -1 else size for size in shape)

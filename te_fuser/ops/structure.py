"""Structure of a list: values that get a name, are read by it, added, cut out, or are given another shape."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_floating, check_name, resolve_shape, whole_number
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import forward_of, gradient_of


@op_table.may_stay_unread.row(lambda fork: fork.may_stay_unread)
class Fork(RowOp):
    """Return the input, and name it for later ops of the list, such as `Add`: y = x, name = x.

    Args:
        name: the name that they read.
        may_stay_unread: True: it is no error if no op reads it.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    may_stay_unread: bool = False

    def __init__(self, name: str, may_stay_unread: bool = False) -> None:
        super().__init__()
        self.name = check_name(name)
        if may_stay_unread:
            self.may_stay_unread = True

    def named_outputs(self) -> tuple[str, ...]:
        return (self.name,)

    def compute(self, x: Any) -> Any:
        return x


@op_table.exports.row(True)
class Output(RowOp):
    """Return the input, and offer it to the caller: y = x, returned by `model(x, outputs=(name,))`.

    Its gradient is added to the others of x and rounded with them, once. Where x is the list's input, or another
    result, the caller gets a view of it: the memory is shared.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_outputs(self) -> tuple[str, ...]:
        return (self.name,)

    def compute(self, x: Any) -> Any:
        return x


class Add(RowOp):
    """Add a named value, of an earlier `Fork` or of the call: y = x + name, of equal shapes, in the wider dtype.

    Raises:
        ValueError: for a name that cannot be a keyword argument.

    Source: He et al., "Deep residual learning for image recognition" (2015).
    """

    promotes = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"other": NamedInput(self.name)}

    def compute(self, x: Any, other: Any) -> Any:
        return x + other


class Take(UnfusedOperation):
    """Continue with a named value, of an earlier `Fork` or of the call, in any shape: y = name.

    The main value before it is dropped, unless an earlier `Fork` has named it.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    views: ClassVar[str] = "value"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"value": NamedInput(self.name, None)}

    def infer_from(self, x: Spec, inputs: Mapping[str, Spec]) -> Spec:
        """Spec of what is taken, as it is."""
        return inputs["value"]

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("value",), (), "value_gradient"),)

    op_forward = forward_of(lambda value: value.view_as(value), "value")
    value_gradient = gradient_of("value", lambda dy: dy, "dy")

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        return call["value"]


class Reshape(UnfusedOperation):
    """Give the same elements, in the same order, in another shape: y = x.reshape(shape), a view where it can be one.

    Args:
        shape: the sizes of the whole output, as arguments or as one sequence; one of them may be -1.

    Raises:
        ValueError: for two -1, another negative size, or a shape that does not hold x's elements.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    views: ClassVar[str] = "input"

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        self.shape = _sizes(type(self).__name__, shape)

    def target(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The output's shape for an input of `shape`."""
        return resolve_shape(self.shape, math.prod(shape))

    def infer(self, x: Spec) -> Spec:
        check_floating(x)
        try:
            shape = self.target(x.shape)
        except ValueError as error:
            raise ValueError(f"{type(self).__name__} cannot take an input of shape {list(x.shape)}: {error}") from error
        return Spec(shape, x.dtype, x.device)

    def kept(self) -> range:
        """The dimensions that stay, counted from the front."""
        return range(0)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        call.notes["shape"] = tuple(x.shape)
        return x.reshape(self.target(tuple(x.shape)))

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return dy.reshape(call.notes["shape"])  # type: ignore[call-overload, no-any-return]

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))


class Flatten(Reshape):
    """Make one dimension of several: [.., a, b, c, ..] -> [.., a b c, ..], like torch.nn.Flatten.

    Args:
        start_dim, end_dim: the first and the last of them; negative ones count from the end.

    Raises:
        ValueError: when x has no such dimensions.
    """

    def __init__(self, start_dim: int = 1, end_dim: int = -1) -> None:
        super().__init__()
        self.start_dim = whole_number("Flatten", "start_dim", start_dim)
        self.end_dim = whole_number("Flatten", "end_dim", end_dim)

    def target(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        first, last = _dimension(self.start_dim, shape), _dimension(self.end_dim, shape)
        if first > last:
            raise ValueError(f"start_dim {self.start_dim} lies behind end_dim {self.end_dim}")
        return (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    def kept(self) -> range:
        return range(max(self.start_dim, 0))

    def extra_repr(self) -> str:
        return f"start_dim={self.start_dim}, end_dim={self.end_dim}"


class Unflatten(Reshape):
    """Make several dimensions of one: [.., a b c, ..] -> [.., a, b, c, ..], like torch.nn.Unflatten.

    Args:
        dim: that one; a negative one counts from the end.
        unflattened_size: the sizes that it becomes, one of which may be -1.

    Raises:
        ValueError: when x has no such dimension, or it does not hold these.
    """

    def __init__(self, dim: int, unflattened_size: Sequence[int]) -> None:
        super().__init__()
        self.dim = whole_number("Unflatten", "dim", dim)
        self.unflattened_size = _sizes("Unflatten", (unflattened_size,))

    def target(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        at = _dimension(self.dim, shape)
        return (*shape[:at], *resolve_shape(self.unflattened_size, shape[at]), *shape[at + 1 :])

    def kept(self) -> range:
        return range(sys.maxsize if self.dim == -1 else max(self.dim, 0))

    def extra_repr(self) -> str:
        return f"dim={self.dim}, unflattened_size={self.unflattened_size}"


def _sizes(op: str, shape: Sequence[int | Sequence[int]]) -> tuple[int, ...]:
    """Sizes given one by one or as one sequence."""
    given = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
    sizes = tuple(whole_number(op, "each size", size) for size in given)  # type: ignore[arg-type]
    if sizes.count(-1) > 1 or any(size < -1 for size in sizes):
        raise ValueError(f"{op} takes sizes of which one may be -1, got {list(sizes)}")
    return sizes


def _dimension(dim: int, shape: tuple[int, ...]) -> int:
    """A dimension counted from the front."""
    if not -len(shape) <= dim < len(shape):
        raise ValueError(f"it has no dimension {dim}")
    return dim % len(shape)

"""Side edges of a list: values that get a name, are read by it, added, or cut out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_name
from te_fuser.ops.row_op import RowOp
from te_fuser.ops.tensor_function import forward_of, gradient_of
from te_fuser.ops.unfused_operation import UnfusedOperation


@op_table.may_stay_unread.row(lambda fork: fork.may_stay_unread)
class Fork(RowOp):
    """Hand the input through and give it a name for later ops of the list, `Add` or others: y = x, name = x.

    Args:
        name: what they call it.
        may_stay_unread: whether it is no error where none does: as in a list that stands in others, or alone.

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
    """Hand the input through and offer it to the caller: y = x, given by `model(x, outputs=(name,))`.

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
    """Add what a `Fork` before it, or the call, names: y = x + name, both of one shape, in the wider of their dtypes.

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
    """Go on with what a `Fork` before it, or the call, names, of whatever shape: y = name.

    What was the main value goes no further, unless a Fork before has given it a name.

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

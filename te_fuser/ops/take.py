"""Take: a named value in place of the main one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec
from te_fuser.ops.checks import check_name
from te_fuser.ops.spread import Spread, Told
from te_fuser.ops.tensor_function import forward_of, gradient_of
from te_fuser.ops.unfused_operation import UnfusedOperation


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
        """What is taken, as it is."""
        return inputs["value"]

    def spread(self, x: Spread, told: Told) -> Spread:
        """That of what is taken; of what the call gives as of the list's input."""
        return told.named.get("value", told.start)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("value",), (), "value_gradient"),)

    op_forward = forward_of(lambda value: value.view_as(value), "value")
    value_gradient = gradient_of("value", lambda dy: dy, "dy")

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        return call["value"]

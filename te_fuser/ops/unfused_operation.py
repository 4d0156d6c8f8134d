"""Opaque ops: a forward and gradients on tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch

from te_fuser.distributed.exchange import Exchange
from te_fuser.ops.base import FusableOperation, Gradient, OpCall, Spec


def by_name(owner: str, result: Any) -> dict[str, torch.Tensor | None]:
    """The gradients of a backward that gives dx, or (dx, {name: gradient}).

    Raises:
        TypeError: when it gives a tuple of anything else.
    """
    if not isinstance(result, tuple):
        return {"input": result}
    if len(result) != 2 or (type(result[1]) is not dict and not isinstance(result[1], Mapping)):
        kinds = ", ".join(type(part).__name__ for part in result)
        raise TypeError(f"{owner}: its backward must return dx, or (dx, {{name: gradient}}), got ({kinds})")
    return {"input": result[0], **result[1]}


def marked_parameters(op: FusableOperation, names: tuple[str, ...]) -> tuple[str, ...]:
    """Bound parameters of an op whose attributes say where their gradient goes."""
    nodes = op.gradients(names) if isinstance(op, UnfusedOperation) else ()
    return tuple([name for gradient in nodes for name in gradient.by_attributes])


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
    multiplies_8_bits: ClassVar[bool] = False  # whether its matrix products, its output's dtype apart, are of 8 bits
    non_differentiable: ClassVar[tuple[str, ...]] = ()  # its outputs that have no gradient, beside those of integers

    # Whether its output is parts of several ranks, joined: a plan may keep this rank's, and run it again in backward.
    gathers: ClassVar[bool] = False

    def emitted_bytes(self, x: Spec) -> Mapping[str, int]:
        """The bytes of each of `emits`, for the plan; what is missing counts as none."""
        return {}

    def scratch_bytes(self, x: Spec) -> int:
        """Bytes of intermediate results that the op's own forward writes and reads again."""
        return 0

    def explicit_bytes(self, x: Spec, inputs: Mapping[str, Spec]) -> int:
        """The bytes of the largest intermediate result of its own forward that a library's kernel would not have."""
        return 0

    def sent_bytes(self, x: Spec, back: bool) -> float:
        """Bytes that a rank sends to those it runs with, of x or, on the way back, of the gradient of its output."""
        return 0.0

    def exchange(self, back: bool) -> Exchange | None:
        """Exchange of x or, on the way back, of the gradient of its output, where the op does no more; else None."""
        return None

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """The nodes of the backward; `names` are the parameters and named inputs that are bound."""
        return (Gradient(("input", *names), self.reads, "whole_backward"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        """The output for x; with `values`, {"output": y, name: z, ...}."""
        raise NotImplementedError(f"{type(self).__name__} must define op_forward(self, call, x)")

    def op_backward(self, call: OpCall, dy: Any) -> Any:
        """dx, or (dx, {name: gradient})."""
        raise NotImplementedError(f"{type(self).__name__} must define op_backward(self, call, dy)")

    def whole_backward(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """op_backward as one node of the graph."""
        return by_name(type(self).__name__, self.op_backward(call, dy))

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        """op_forward, recorded by autograd: so verify checks op_backward against it."""
        started = self.op_forward(call, x)
        return started if self.op_wait is None else self.op_wait(call, started)

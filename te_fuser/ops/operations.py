"""Opaque ops, with a forward and gradients on tensors; and fused ones, which stand for several ops by one name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from te_fuser.distributed.exchange import Exchange
from te_fuser.guards import Facts
from te_fuser.ops.base import FusableOperation, Gradient, LoweredOp, OpCall, Place, Spec, Whole, output_specs
from te_fuser.ops.hooks import facts_of_parts, refuse_hooks


def by_name(owner: str, result: Any) -> dict[str, torch.Tensor | None]:
    """Gradients of a backward that gives dx, or (dx, {name: gradient})."""
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

    Write `op_forward(call, x)` and `op_backward(call, dy)`, which returns dx or (dx, {name: gradient}). `reads` names
    the values that backward needs, `emits` those that forward saves by `call.emit`. An op whose gradients may run as
    separate steps defines `gradients` instead. With `values` forward returns all outputs by name, and backward reads
    their gradients by `call.get("d_name")`; each, and dy, is None where there is none.
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
        """Bytes of each name in `emits`, for the plan; missing names count as 0."""
        return {}

    def scratch_bytes(self, x: Spec) -> int:
        """Bytes of intermediate results that the op's own forward writes and reads again."""
        return 0

    def explicit_bytes(self, x: Spec, inputs: Mapping[str, Spec]) -> int:
        """Bytes of the largest intermediate result of its own forward, which a library's kernel avoids."""
        return 0

    def sent_bytes(self, x: Spec, back: bool) -> float:
        """Bytes that a rank sends, of x or of its output's gradient."""
        return 0.0

    def exchange(self, back: bool) -> Exchange | None:
        """Exchange of x, or of its output's gradient, where the op does no more."""
        return None

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        """Nodes of the backward, each with inputs and method; `names` are the op's parameters and named inputs."""
        return (Gradient(("input", *names), self.reads, "whole_backward"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        """The output for x; with `values`, {"output": y, name: z, ...}."""
        raise NotImplementedError(f"{type(self).__name__} must define op_forward(self, call, x)")

    def op_backward(self, call: OpCall, dy: Any) -> Any:
        """dx, or (dx, {name: gradient})."""
        raise NotImplementedError(f"{type(self).__name__} must define op_backward(self, call, dy)")

    def whole_backward(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """Gradients by `op_backward`, as one node of the graph."""
        return by_name(type(self).__name__, self.op_backward(call, dy))

    def reference(self, call: OpCall, x: torch.Tensor) -> Any:
        """op_forward, recorded by autograd: so verify checks op_backward against it."""
        started = self.op_forward(call, x)
        return started if self.op_wait is None else self.op_wait(call, started)


class FusedOperation(FusableOperation):
    """Module of several consecutive ops that a fusion's pattern can name as one.

    Give the ops by name, in their order: `super().__init__(up=ops.Linear(8, 16), gate=ops.SwiGLU())`. In a list it is
    lowered to them. A pattern with its class matches one such module, and covers all its elementary ops (`m[0]`,
    `m[1]`, ...); it does not match the same ops elsewhere.

    Raises:
        TypeError: when a part is no op; or, when it is used, has hooks, which would not run.
        ValueError: without any part.
    """

    family = True

    def __init__(self, **parts: FusableOperation) -> None:
        super().__init__()
        if not parts:
            raise ValueError(f"{type(self).__name__} stands for no op at all; give it some, by name and in order")
        for name, part in parts.items():
            if not isinstance(part, FusableOperation):
                got = type(part).__name__
                raise TypeError(f"{type(self).__name__}: part {name!r} is a {got}; a fused operation stands for ops")
            self.add_module(name, part)

    def parts(self) -> dict[str, FusableOperation]:
        """Ops of the module, by name."""
        return {name: part for name, part in self._modules.items() if isinstance(part, FusableOperation)}

    def facts(self) -> Facts:
        return Facts.of([super().facts(), facts_of_parts(self)])

    def lower(self) -> list[LoweredOp]:
        for name, part in self.parts().items():
            refuse_hooks(self, name, part)
        found = [replace(low, suffix=f".{n}{low.suffix}") for n, part in self.parts().items() for low in part.lower()]
        whole = Whole(self.kind)
        return [replace(low, places=(Place(whole, k, len(found)), *low.places)) for k, low in enumerate(found)]

    def infer(self, x: Spec) -> Spec:
        for part in self.parts().values():
            x = output_specs(part, x)["output"]
        return x

"""What a method of an opaque op is where it is a plain function of tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser.ops.base import OpCall, UnfusedOperation


@dataclass(frozen=True)
class TensorFunction:
    """A plain function of tensors that a method of an opaque op amounts to: steps call it without an OpCall around it.

    `reads` names its arguments: "input" or "dy", parameters, named inputs.
    """

    function: Callable[..., torch.Tensor]
    reads: tuple[str, ...]


def forward_of(function: Callable[..., torch.Tensor], *reads: str) -> Callable[..., torch.Tensor]:
    """`op_forward` of an op whose output is a function of tensors alone; `reads` names them, "input" among them.

    A subclass that defines its own op_forward replaces it.
    """

    def op_forward(self: UnfusedOperation, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The output for x."""
        return function(*[x if name == "input" else call[name] for name in reads])

    op_forward.plain = TensorFunction(function, reads)  # type: ignore[attr-defined]
    return op_forward


def gradient_of(
    name: str, function: Callable[..., torch.Tensor], *reads: str
) -> Callable[..., dict[str, torch.Tensor | None]]:
    """A gradient method that gives `name` alone, a function of tensors; `reads` names them, "dy" among them."""

    def gradient(self: UnfusedOperation, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The gradient of one argument."""
        return {name: function(*[dy if read == "dy" else call[read] for read in reads])}

    gradient.plain = TensorFunction(function, reads)  # type: ignore[attr-defined]
    return gradient

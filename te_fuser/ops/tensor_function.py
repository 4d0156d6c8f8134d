"""Functions of tensors that ops amount to: those that are a method of an opaque op, and PyTorch's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from te_fuser.ops.base import OpCall
from te_fuser.ops.op_table import Kind, OpTable
from te_fuser.ops.operations import UnfusedOperation


@dataclass(frozen=True)
class TensorFunction:
    """A function of tensors, `reads` by name, that an opaque op's method amounts to."""

    function: Callable[..., torch.Tensor]
    reads: tuple[str, ...]


@dataclass(frozen=True)
class TorchFunction:
    """A function of PyTorch's that an op amounts to, which autograd records and differentiates.

    x, and the parameters and named inputs that are bound, all have one dtype.

    Attributes:
        name: what plans call it.
        reads: what it takes, by name: "input", parameters, named inputs.
        keeps: gradient -> what autograd keeps for it, by name: one of these, or "output".
        statistics: how many float32 numbers of each row it keeps as well.
        at_once: whether one operation gives all gradients, and not one for each.
        takes_addend: whether, as a last argument, it takes what the next op adds.
        addend: what this op adds to its input, by name, where the function of the op before may take that.
    """

    name: str
    function: Callable[..., torch.Tensor]
    reads: tuple[str, ...] = ("input",)
    keeps: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    statistics: int = 0
    at_once: bool = True
    takes_addend: bool = False
    addend: str = ""


TORCH_FUNCTIONS: OpTable[TorchFunction | Callable[..., TorchFunction | None] | None] = OpTable(
    "torch_function", default=None, inherited=False
)


def torch_function(found: TorchFunction | Callable[..., TorchFunction | None]) -> Callable[[Kind], Kind]:
    """Decorator that names the function of PyTorch's that a class of ops amounts to; a subclass may mean another.

    Args:
        found: the function; or f(op, x, names) -> the function, or None where there is none, for what is known of x
            (`Spec`) and the names of the parameters and named inputs that are bound.
    """
    if not isinstance(found, TorchFunction) and not inspect.isfunction(found):
        raise TypeError(f"torch_function takes a TorchFunction, or a function (op, x, names) of it, got {found!r}")
    return TORCH_FUNCTIONS.row(found)


def forward_of(function: Callable[..., torch.Tensor], *reads: str) -> Callable[..., torch.Tensor]:
    """`op_forward` of an op that is a function of tensors alone, `reads` by name."""

    def op_forward(self: UnfusedOperation, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        """The output for x."""
        return function(*[x if name == "input" else call[name] for name in reads])

    op_forward.plain = TensorFunction(function, reads)  # type: ignore[attr-defined]
    return op_forward


def gradient_of(
    name: str, function: Callable[..., torch.Tensor], *reads: str
) -> Callable[..., dict[str, torch.Tensor | None]]:
    """A gradient method of `name` alone, a function of tensors `reads`, "dy" among them."""

    def gradient(self: UnfusedOperation, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        """The gradient of one argument."""
        return {name: function(*[dy if read == "dy" else call[read] for read in reads])}

    gradient.plain = TensorFunction(function, reads)  # type: ignore[attr-defined]
    return gradient

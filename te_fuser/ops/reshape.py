"""Reshape: the same elements in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from te_fuser.ops.base import OpCall, Spec, UnfusedOperation
from te_fuser.ops.checks import check_floating, resolve_shape


class Reshape(UnfusedOperation):
    """Give the same elements, in the same order, in another shape: y = x.reshape(shape), a view where it can be one.

    Args:
        shape: the sizes of the whole output, as arguments or as one sequence; one of them may be -1.

    Raises:
        ValueError: for two -1, another negative size, or a shape that does not hold x's elements.
    """

    reads: ClassVar[tuple[str, ...]] = ()
    views: ClassVar[bool] = True

    def __init__(self, *shape: int | Sequence[int]) -> None:
        super().__init__()
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        self.shape = tuple(int(size) for size in sizes)  # type: ignore[arg-type, union-attr]
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ValueError(f"Reshape takes sizes of which one may be -1, got {list(self.shape)}")

    def infer(self, x: Spec) -> Spec:
        check_floating(x)
        try:
            shape = resolve_shape(self.shape, math.prod(x.shape))
        except ValueError as error:
            raise ValueError(f"Reshape cannot take an input of shape {list(x.shape)}: {error}") from error
        return Spec(shape, x.dtype, x.device)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        call.notes["shape"] = tuple(x.shape)
        return x.reshape(resolve_shape(self.shape, x.numel()))

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return dy.reshape(call.notes["shape"])  # type: ignore[call-overload, no-any-return]

    @classmethod
    def prototype(cls, features: int, name: str, **changed: Any) -> Reshape:
        return cls(-1, features, **changed)

    def example(self, features: int, rng: torch.Generator) -> Reshape:
        return Reshape(-1, features)

    def extra_repr(self) -> str:
        return ", ".join(map(str, self.shape))

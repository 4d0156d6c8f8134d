"""Transposed: a parameter that lies the other way round than an op reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from te_fuser.params.binding import WeakBinding


@dataclass(frozen=True)
class Transposed:
    """A matrix of a module, by its name, as its transpose: `Bound(op, owner, weight=Transposed("weight"))`.

    So a MatMul reads a weight [in, out] as its [out, in], in place: products take either order.
    """

    name: str


class TransposedBinding(WeakBinding):
    """The transpose of a parameter, a view that each call makes."""

    tells: ClassVar[bool] = True

    def __init__(self, owner: torch.nn.Module, name: str) -> None:
        super().__init__(owner, f"{name}.T")
        object.__setattr__(self, "_plain", name)

    @property
    def computed(self) -> bool:
        return True

    def get(self) -> torch.Tensor:
        """The transpose.

        Raises:
            ValueError: when the parameter is no matrix.
        """
        found: torch.Tensor = getattr(self.owner, self.__dict__["_plain"])
        if found.dim() != 2:
            raise ValueError(f"{self.name} of {type(self.owner).__name__} is read of a matrix, got {list(found.shape)}")
        return found.t()

    def look(self, made: Callable[..., torch.Tensor]) -> torch.Tensor:
        found = self.get()
        return made(tuple(found.shape), found.dtype, found.device, found.requires_grad)

    def weak(self) -> TransposedBinding:
        return self

"""Output: a value that the caller can ask for by name."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.ops.base import RowOp
from te_fuser.ops.checks import check_name


class Output(RowOp):
    """Hand the input through and offer it to the caller: y = x, given by `model(x, outputs=(name,))`.

    Raises:
        ValueError: for a name that cannot be a keyword argument.
    """

    exports = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = check_name(name)

    def named_outputs(self) -> tuple[str, ...]:
        return (self.name,)

    def compute(self, x: Any) -> Any:
        return x

    @classmethod
    def prototype(cls, features: int, name: str, **changed: Any) -> Output:
        return cls(name, **changed)

    def example(self, features: int, rng: torch.Generator) -> Output:
        return Output(self.name)

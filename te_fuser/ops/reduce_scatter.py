"""ReduceScatter: to each rank its block of the sum over all."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import whole_number
from te_fuser.ops.collective import Collective
from te_fuser.ops.exchange import Exchange


class ReduceScatter(Collective):
    """Add up the x of all ranks, of which each gets its block along a dimension: y = block of rank in sum(x).

    dx are the dy of all ranks joined, as `AllGather` gives them; the loss is the sum of all ranks'. The sum is taken in
    x's dtype.

    Args:
        group: the ranks; see `Collective`.
        dim: the dimension that is cut into as many equal parts as there are ranks; a negative one counts from the end.

    Raises:
        ValueError: when x has no such dimension, or it cannot be cut so.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
    """

    def __init__(self, group: Any, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = whole_number("ReduceScatter", "dim", dim)

    @property
    def forth(self) -> Exchange:
        return Exchange(cut=self.dim)

    @property
    def back(self) -> Exchange:
        return Exchange(join=self.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"

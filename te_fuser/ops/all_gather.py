"""AllGather: the tensors of all ranks, one behind the other."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import whole_number
from te_fuser.ops.collective import Collective
from te_fuser.ops.exchange import Exchange


class AllGather(Collective):
    """Join the x of all ranks along a dimension: y = [x of rank 0; x of rank 1; ..], the same on all.

    dx is this rank's block of the sum of all ranks' dy, as `ReduceScatter` gives it: what follows may differ from rank
    to rank, as with a weight that is cut along its outputs, and the loss is the sum of theirs.

    Args:
        group: the ranks; see `Collective`.
        dim: the dimension, of which y has as many times more as there are ranks; a negative one counts from the end.

    Raises:
        ValueError: when x has no such dimension.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
    """

    def __init__(self, group: Any, dim: int = 0) -> None:
        super().__init__(group)
        self.dim = whole_number("AllGather", "dim", dim)

    @property
    def forth(self) -> Exchange:
        return Exchange(join=self.dim)

    @property
    def back(self) -> Exchange:
        return Exchange(cut=self.dim)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, dim={self.dim}"

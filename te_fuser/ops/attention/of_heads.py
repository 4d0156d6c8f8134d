"""OfHeads: an op on heads, of which ranks that cut features have their part each; OfPositions: one by positions."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.context import InContext
from te_fuser.ops.unfused_operation import UnfusedOperation


class OfHeads(UnfusedOperation):
    """An op on heads side by side among the features; where ranks cut these, each has whole heads.

    Attributes:
        heads: query heads, those of all ranks together.
        kv_heads: key and value heads, the same.
        heads_of_rank: whether these are the heads of this rank alone.
    """

    family = True
    heads: Any
    kv_heads: Any
    heads_of_rank: bool = False


class OfPositions(OfHeads, InContext):
    """An op on heads to which it matters where in the sequence its rows stand."""

    family = True

    @property
    def sequence_dim(self) -> int:
        """The dimension of the positions."""
        raise NotImplementedError(f"{type(self).__name__} must say along which dimension positions lie")

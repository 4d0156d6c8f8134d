"""OfHeads: an op on heads, of which ranks that cut features have their part each; OfPositions: one by positions."""

from __future__ import annotations

from typing import Any

from te_fuser.distributed.group import Group
from te_fuser.distributed.spread import FEATURES, PARTIAL, Spread, Told
from te_fuser.ops.base import FusableOperation
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

    def of_rank(self, x: Spread, told: Told) -> FusableOperation:
        """The op with a rank's heads.

        Raises:
            ValueError: when there are no equal parts.
        """
        if x != FEATURES or self.heads_of_rank:
            return self
        ranks, counts = told.group.size, {"heads": self.heads, "kv_heads": self.kv_heads}
        for name, count in counts.items():
            if (count or 0) % ranks:
                raise ValueError(
                    f"{type(self).__name__}: {name}={count} cannot be cut into {ranks} equal parts, one for each "
                    f"rank of {told.group.title}: change one"
                )
        return self.with_attributes(**{name: count and count // ranks for name, count in counts.items()})

    def spread(self, x: Spread, told: Told) -> Spread:
        """As x, whose sequences are whole."""
        for argument, other in told.named.items():
            if other != x:
                raise ValueError(
                    f"{type(self).__name__}: x is {x} in the ranks of {told.group.title}, {argument} is {other}: make "
                    "both alike"
                )
        if x.by_rows or x == PARTIAL:
            do = (
                "give it that group as its context, as parallelize(model, context=mesh['cp']) does"
                if x.outer
                else "a product before it with parallel_mode='column' and sequence_parallel=True gathers them"
            )
            raise ValueError(
                f"{type(self).__name__} takes whole sequences, and x is {x} in the ranks of {told.group.title}: {do}"
            )
        return x


class OfPositions(OfHeads, InContext):
    """An op on heads to which it matters where in the sequence its rows stand."""

    family = True

    @property
    def sequence_dim(self) -> int:
        """The dimension of the positions."""
        raise NotImplementedError(f"{type(self).__name__} must say along which dimension positions lie")

    def shared_by(self) -> Group | None:
        return self.context if self.context.size > 1 else None

    def takes_spread(self) -> Spread:
        return self._context.rows(self.sequence_dim)

    def spread(self, x: Spread, told: Told) -> Spread:
        """As x: of its context's ranks each has a part of the sequence."""
        if told.group != self.shared_by():
            return super().spread(x, told)
        for name, given in {"x": x, **told.named}.items():
            if given != self.takes_spread():
                raise ValueError(
                    f"{type(self).__name__} with the ranks of {told.group.title} as its context takes what is "
                    f"{self.takes_spread()}, and {name} is {given}: let these ranks cut sequences alone"
                )
        return x

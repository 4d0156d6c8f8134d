"""AllReduce: the sum over all ranks, whose gradient passes."""

from __future__ import annotations

from te_fuser.ops.collective import Collective
from te_fuser.ops.exchange import Exchange


class AllReduce(Collective):
    """Add up the x of all ranks: y = sum(x), dx = dy.

    What follows is the same on all ranks, and so is dy: the loss is that of any one of them. The sum is taken in x's
    dtype.

    Args:
        group: the ranks; see `Collective`.

    Source: g in Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism"
    (2019).
    """

    @property
    def forth(self) -> Exchange:
        return Exchange()

    @property
    def back(self) -> None:
        return None

"""AllReduceGradient: the same values, whose gradient is summed over all ranks."""

from __future__ import annotations

from te_fuser.ops.collective import Collective
from te_fuser.ops.exchange import Exchange


class AllReduceGradient(Collective):
    """Hand x on, and add up the gradients of all ranks: y = x, dx = sum(dy).

    x is the same on all ranks, what follows is each rank's own share, as with a weight that is cut along its outputs.
    The sum is taken in dy's dtype.

    Args:
        group: the ranks; see `Collective`.

    Source: f in Shoeybi et al., "Megatron-LM: training multi-billion parameter language models using model parallelism"
    (2019).
    """

    @property
    def forth(self) -> None:
        return None

    @property
    def back(self) -> Exchange:
        return Exchange()

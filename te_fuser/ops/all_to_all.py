"""AllToAll: one dimension whole in place of another."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import whole_number
from te_fuser.ops.collective import Collective, Exchange


class AllToAll(Collective):
    """Send to each rank its block of x along `cut`, and join what arrives along `join`.

    Of something that is cut along `join`, a block a rank, each has then all of that and a block along `cut`: heads in
    place of positions, say. dx is dy sent back, with the two dimensions in turn; the loss is the sum of all ranks'.

    Args:
        group: the ranks; see `Collective`.
        cut: the dimension that is cut into as many equal parts as there are ranks; a negative one counts from the end.
        join: the dimension of which y has as many times more.

    Raises:
        ValueError: when x has no such dimensions, or the first cannot be cut so.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    prototype_arguments = {**Collective.prototype_arguments, "cut": 0, "join": 1}

    def __init__(self, group: Any, cut: int, join: int) -> None:
        super().__init__(group)
        self.cut = whole_number("AllToAll", "cut", cut)
        self.join = whole_number("AllToAll", "join", join)

    @property
    def forth(self) -> Exchange:
        return Exchange(self.cut, self.join)

    @property
    def back(self) -> Exchange:
        return Exchange(self.join, self.cut)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, cut={self.cut}, join={self.join}"

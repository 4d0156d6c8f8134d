"""AllToAll: one dimension whole in place of another."""

from __future__ import annotations

from typing import Any

from te_fuser.ops.checks import count, whole_number, yes_or_no
from te_fuser.ops.collective import Collective
from te_fuser.ops.exchange import Exchange


class AllToAll(Collective):
    """Send to each rank its block of x along `cut`, and join what arrives along `join`.

    Of something that is cut along `join`, a block a rank, each has then all of that and a block along `cut`: heads in
    place of positions, say. dx is dy sent back, with the two dimensions in turn; the loss is the sum of all ranks'.

    Args:
        group: the ranks; see `Collective`.
        cut: the dimension that is cut into as many equal parts as there are ranks; a negative one counts from the end.
        join: the dimension of which y has as many times more.
        parts: sizes of what lies side by side along the last dimension, as far as they matter, as (4, 2, 2) of queries,
            keys and values: each is cut and joined by itself.
        balanced: whether ranks have of sequences along the other dimension what `Context` says of balanced ones.

    Raises:
        ValueError: when x has no such dimensions, or the first cannot be cut so.

    Source: Jacobs et al., "DeepSpeed Ulysses" (2023).
    """

    prototype_arguments = {**Collective.prototype_arguments, "cut": 0, "join": 1}

    def __init__(self, group: Any, cut: int, join: int, parts: tuple[int, ...] = (1,), balanced: bool = False) -> None:
        super().__init__(group)
        self.cut = whole_number("AllToAll", "cut", cut)
        self.join = whole_number("AllToAll", "join", join)
        self.parts = tuple(count("AllToAll", "a size of parts", size) for size in parts)
        self.balanced = yes_or_no("AllToAll", "balanced", balanced)

    @property
    def forth(self) -> Exchange:
        return Exchange(self.cut, self.join, self.parts, self.balanced)

    @property
    def back(self) -> Exchange:
        return self.forth.back

    def extra_repr(self) -> str:
        parts = f", parts={self.parts}" * (len(self.parts) > 1)
        balanced = ", balanced=True" * self.balanced
        return f"{super().extra_repr()}, cut={self.cut}, join={self.join}{parts}{balanced}"

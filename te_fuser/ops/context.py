"""Context: how the ranks of a group cut sequences, which attention alone has to see whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_fuser.distributed.group import Group
from te_fuser.ops.checks import yes_or_no

Spans = tuple[tuple[int, int], ...]


def spans(positions: int, ranks: int, rank: int, balanced: bool) -> Spans:
    """Blocks of the whole that are the `positions` positions of a rank, each as (first, number)."""
    if not balanced or ranks == 1:
        return ((rank * positions, positions),)
    half = positions // 2
    return ((rank * half, half), ((2 * ranks - 1 - rank) * half, half))


def blocks_of(whole: torch.Tensor, blocks: Spans, dim: int = 0) -> torch.Tensor:
    """Blocks of the whole along a dimension, one behind the other; a view where there is one."""
    parts = [whole.narrow(dim, first, count) for first, count in blocks]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@dataclass(frozen=True)
class Context:
    """Division of the positions of a sequence among the ranks of a group; this process alone has all.

    Attributes:
        group: the ranks.
        balanced: of 2 n equal blocks rank r of n has the blocks r and 2 n - 1 - r, one behind the other, so that causal
            masks leave all ranks as much to do; else of n blocks the block r.
    """

    group: Group = Group()
    balanced: bool = False

    def spans(self, positions: int) -> Spans:
        """Blocks of the whole that are this rank's `positions` positions, each as (first, number)."""
        return spans(positions, self.group.size, self.group.rank, self.balanced)

    def own(self, whole: torch.Tensor, positions: int, dim: int = 0) -> torch.Tensor:
        """Positions of this rank among the first of the whole, along a dimension; a view where they are one block."""
        return blocks_of(whole, self.spans(positions), dim)

    def check(self, op: str, whole: int) -> None:
        """Refuse sequences that cannot be cut so.

        Raises:
            ValueError: naming the ranks and what to do.
        """
        blocks = self.group.size * (2 if self.balanced else 1)
        if whole % blocks:
            raise ValueError(
                f"{op} on {self.group}: a sequence of {whole} positions cannot be cut into {blocks} equal blocks: pad "
                f"it to a multiple of {blocks}"
            )


class InContext:
    """Base of ops that run on a rank's part of sequences; both attributes may be set at any time.

    Attributes:
        context: the ranks that cut sequences, this process alone at first; it may be set to what `Group.of` takes.
        balanced: which positions each rank has, see `Context`.
    """

    _context: Context = Context()

    @property
    def context(self) -> Group:
        return self._context.group

    @context.setter
    def context(self, group: Any) -> None:
        self._context = Context(Group.of(type(self).__name__, group), self._context.balanced)

    @property
    def balanced(self) -> bool:
        return self._context.balanced

    @balanced.setter
    def balanced(self, is_balanced: bool) -> None:
        self._context = Context(self._context.group, yes_or_no(type(self).__name__, "balanced", is_balanced))

"""Sharing among the ranks of a group: of an op (`Cut`), and of the positions of sequences (`Context`).

Attention alone has to see sequences whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from te_fuser.distributed.group import Group, OfRanks
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.checks import whole_number, yes_or_no

COLUMN, ROW = "column", "row"
SHARING = ("parallel_mode", "group", "sequence_parallel", "sequence_dim")  # attributes of every such op

Op = TypeVar("Op", bound=FusableOperation)
Sharing = TypeVar("Sharing", bound="Cut")


class Cut(OfRanks, FusableOperation):
    """An op whose parameters or rows may be sharded over the ranks of a group; attributes may be set at any time.

    Sizes stay those of the whole op; `parameter_shapes()` are those of this rank's part. A list runs the op of this
    rank's part in its place, with collectives around it (`te_fuser.sharding`).

    Attributes:
        parallel_mode: "column": each rank has a part of the output features, and of the parameters along them; "row": a
            part of the input features, and the output is the sum over ranks; None: all parameters.
        group: the ranks; set to a dimension of a DeviceMesh, a ProcessGroup, or a `Group`. By default this process.
        sequence_parallel: tensors with all features are sharded by rows: a "column" op gathers its input first, a "row"
            op scatters its output, and an op without a mode runs on this rank's rows.
        sequence_dim: the dimension of these rows.

    Raises:
        TypeError, ValueError: when set to what it cannot be.
    """

    family = True
    modes: ClassVar[tuple[str, ...]] = (COLUMN, ROW)
    _parallel_mode: str | None = None
    _sequence_parallel: bool = False
    _sequence_dim: int = 0

    @property
    def parallel_mode(self) -> str | None:
        return self._parallel_mode

    @parallel_mode.setter
    def parallel_mode(self, mode: str | None) -> None:
        if mode is not None and mode not in self.modes:
            takes = ", ".join(map(repr, self.modes))
            raise ValueError(
                f"{type(self).__name__}: parallel_mode={mode!r} is unknown: use {takes or 'none'}, or None"
            )
        self._parallel_mode = mode

    @property
    def sequence_parallel(self) -> bool:
        return self._sequence_parallel

    @sequence_parallel.setter
    def sequence_parallel(self, is_cut: bool) -> None:
        self._sequence_parallel = yes_or_no(type(self).__name__, "sequence_parallel", is_cut)

    @property
    def sequence_dim(self) -> int:
        return self._sequence_dim

    @sequence_dim.setter
    def sequence_dim(self, dim: int) -> None:
        self._sequence_dim = whole_number(type(self).__name__, "sequence_dim", dim)

    @property
    def is_cut(self) -> bool:
        """True where each rank has a part of the parameters."""
        return self.parallel_mode is not None and self.group.size > 1

    def share(self, size: int, name: str) -> int:
        """A rank's part of a size."""
        ranks = self.group.size
        if size % ranks:
            raise ValueError(
                f"{type(self).__name__}: {name}={size} cannot be cut into {ranks} equal parts, one for each rank of "
                f"{self.group.title}: change one"
            )
        return size // ranks

    def shared_as(self: Sharing, other: Cut) -> Sharing:
        """Share this op as another one is, by the same ranks in the same way, and return it."""
        for name in SHARING:
            setattr(self, name, getattr(other, name))
        return self

    def extra_repr(self) -> str:
        own = super().extra_repr()
        mode = [] if self.parallel_mode is None else [f"parallel_mode={self.parallel_mode!r}"]
        rows = [f"sequence_parallel=True, sequence_dim={self.sequence_dim}"] if self.sequence_parallel else []
        ranks = [f"ranks={self.group.size} ({self.group.title})"] if self.group.size > 1 else []
        return ", ".join([*([own] if own else []), *mode, *rows, *ranks])


Spans = tuple[tuple[int, int], ...]


def spans(positions: int, ranks: int, rank: int, balanced: bool) -> Spans:
    """Blocks of the whole that are the `positions` positions of a rank, each as (first, number)."""
    if not balanced or ranks == 1:
        return ((rank * positions, positions),)
    half = positions // 2
    return ((rank * half, half), ((2 * ranks - 1 - rank) * half, half))


def blocks_of(whole: torch.Tensor, blocks: Spans, dim: int = 0) -> torch.Tensor:
    """Blocks of the whole along a dimension, one behind the other."""
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
        """Positions of this rank among the first of the whole."""
        return blocks_of(whole, self.spans(positions), dim)

    def check(self, op: str, whole: int) -> None:
        """Refuse sequences that cannot be cut so."""
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

"""Ops on heads, of which ranks that cut features have their part each, and an attention that ranks share."""

from __future__ import annotations

from typing import Any

import torch

from te_fuser.distributed.group import Group
from te_fuser.ops.attention.heads import LAYOUTS, AnyHeads
from te_fuser.ops.attention.math import AttentionScores
from te_fuser.ops.operations import UnfusedOperation
from te_fuser.ops.sharing import InContext


class OfHeads(UnfusedOperation):
    """An op on heads side by side among the features; sharded over ranks by whole heads.

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
    """An op on heads whose result depends on the positions of its rows in the sequence."""

    family = True

    @property
    def sequence_dim(self) -> int:
        """The dimension of the positions."""
        raise NotImplementedError(f"{type(self).__name__} must say along which dimension positions lie")


def own_sinks(sinks: torch.Tensor, group: Group) -> torch.Tensor:
    """Part of the sinks of all heads: those of the heads that this rank of a group runs."""
    count = sinks.shape[0] // group.size
    return sinks if group.size == 1 else sinks.narrow(0, group.rank * count, count)


def whole_sinks(own: torch.Tensor, group: Group) -> torch.Tensor:
    """Term of this rank in the gradient of all sinks, made of the gradient of its own."""
    if group.size == 1:
        return own
    made = own.new_zeros(own.shape[0] * group.size)
    own_sinks(made, group).copy_(own)
    return made


class SharedAttention(OfPositions):
    """Attention that ranks share: each has whole heads, where they cut features and where they cut sequences.

    Masks, lengths, offsets and slopes are those of whole sequences, for the heads that this rank runs.

    Attributes:
        sink_group: the ranks of which each has the learned sinks of its heads alone, where these are a DTensor.
    """

    family = True
    _sink_group: Group = Group()
    _heads_of: Group = Group()  # the ranks of which this one runs its part of the heads, and has the sinks of all
    layout: str
    packing: Any
    scores: AttentionScores

    @property
    def packed(self) -> AnyHeads:
        """Layout of the heads."""
        raise NotImplementedError(f"{type(self).__name__} must say where its heads lie")

    @property
    def sequence_dim(self) -> int:
        """The dimension of the positions."""
        return LAYOUTS[self.layout][0] if self.layout in LAYOUTS else 0

    @property
    def sink_group(self) -> Group:
        return self._sink_group

    @sink_group.setter
    def sink_group(self, group: Any) -> None:
        self._sink_group = Group.of(type(self).__name__, group)

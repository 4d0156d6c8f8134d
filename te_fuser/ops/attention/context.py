"""Attention on sequences that ranks cut: an exchange of heads for positions around it.

Each rank has its part of the sequence with all heads, sends to each other rank the heads that this is to run, and has
then the whole sequence with its part of the heads; the output goes back the same way.

Source: Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence
Transformer models" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from te_fuser.distributed.group import Group
from te_fuser.distributed.spread import FEATURES, Spread, Told
from te_fuser.ops.attention.heads import LAYOUTS, AnyHeads, ApartHeads
from te_fuser.ops.attention.of_heads import OfPositions
from te_fuser.ops.attention.scores import AttentionScores
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.collectives import AllToAll
from te_fuser.ops.structure import Fork, Take


def own_sinks(sinks: torch.Tensor, group: Group) -> torch.Tensor:
    """Of the sinks of all heads those of the heads that this rank of a group runs."""
    count = sinks.shape[0] // group.size
    return sinks if group.size == 1 else sinks.narrow(0, group.rank * count, count)


def whole_sinks(own: torch.Tensor, group: Group) -> torch.Tensor:
    """This rank's term of the gradient of all sinks, of that of its own."""
    if group.size == 1:
        return own
    made = own.new_zeros(own.shape[0] * group.size)
    own_sinks(made, group).copy_(own)
    return made


class SharedAttention(OfPositions):
    """What ranks have of an attention: whole heads where they cut features, and where they cut sequences.

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
        """Where the heads lie."""
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

    def cuts(self) -> Mapping[str, tuple[int, Group]]:
        return {"sink": (0, self.sink_group)} if self.sink_group.size > 1 else {}

    def draws_for(self, x: Spread, told: Told) -> Spread:
        """Probabilities of its heads."""
        return FEATURES if told.group == self.shared_by() else x

    def of_rank(self, x: Spread, told: Told) -> FusableOperation:
        if x == FEATURES and self.scores.alibi is True:
            raise ValueError(
                f"{type(self).__name__}: its slopes are those of all heads, and each rank of {told.group.title} has "
                "some of these: give the slopes of this rank's heads, alibi_slopes"
            )
        return super().of_rank(x, told)

    def spread(self, x: Spread, told: Told) -> Spread:
        if told.group == self.shared_by():
            self._check_heads()
        return super().spread(x, told)

    def summed(self, x: Spread, told: Told) -> tuple[str, ...]:
        """The sinks are cut as the heads are."""
        return () if x == FEATURES else super().summed(x, told)

    def each_rank(self) -> tuple[FusableOperation, ...]:
        """AllToAll, attention, AllToAll; keys and values that are apart are exchanged before."""
        return (self,) if self.shared_by() is None else tuple(self._exchanging())

    def _exchanging(self) -> Iterator[FusableOperation]:
        apart = self.packed.apart if isinstance(self.packed, ApartHeads) else None
        named = {} if apart is None else apart.names
        if named:
            yield Fork("exchanged_queries")
        for argument, name in named.items():
            yield Take(name)
            yield self._to_heads(self._sides_of(argument))
            yield Fork(f"exchanged_{argument}")
        if named:
            yield Take("exchanged_queries")
        yield self._to_heads(self._sides_of("input"))
        ranks = self.context.size
        whole: dict[str, Any] = {argument: f"exchanged_{argument}" for argument in named}
        others = {} if apart is None else {"packing": replace(apart, **whole)}
        own = {"heads": self.heads // ranks, "kv_heads": self.kv_heads // ranks, **others}
        yield self.with_attributes(_context=type(self)._context, _heads_of=self.context, **own)
        yield AllToAll(self.context, self.sequence_dim, -1, balanced=self.balanced)

    def _to_heads(self, parts: tuple[int, ...]) -> AllToAll:
        return AllToAll(self.context, -1, self.sequence_dim, parts, self.balanced)

    def _sides_of(self, argument: str) -> tuple[int, ...]:
        """Sizes of what lies side by side in an input, each of which has all heads."""
        heads = self.packed
        if isinstance(heads, ApartHeads):
            blocked = argument == "key_value" and heads.apart.packing == "blocked"
            return (heads.head_dim, heads.value_dim) if blocked else (1,)
        return (heads.heads, heads.kv_heads, heads.kv_heads) if heads.packing == "blocked" else (1,)

    def _check_heads(self) -> None:
        """Refuse what cannot be exchanged.

        Raises:
            ValueError: saying what to do.
        """
        who, ranks = f"{type(self).__name__} on {self.context}", self.context.size
        if self.kv_heads % ranks:
            raise ValueError(
                f"{who}: kv_heads={self.kv_heads} cannot be cut into {ranks} equal parts, one for each rank that cuts "
                "the sequence: take fewer ranks for the context, or more key/value heads"
            )
        if self.balanced and self.layout not in LAYOUTS:
            raise ValueError(
                f"{who}: of sequences one behind the other (qkv_format='thd') each rank has one block of all tokens, "
                "and balanced=True, which cp_group says, gives two: in place of cp_group take "
                "te_fuser.parallel.parallelize(model, context=group), of an op set balanced=False, or give samples of "
                "one length"
            )
        scores = self.scores
        asked = {"a bias": scores.bias, "ALiBi": scores.alibi is True}
        for what, is_asked in asked.items():
            if is_asked:
                raise ValueError(
                    f"{who}: {what} is of all heads, and each rank of a context runs some of these: leave one out"
                )

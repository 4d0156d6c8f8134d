"""Sharding rules of ops on heads: where ranks cut features, each has whole heads.

Where ranks cut sequences, attention exchanges heads for positions: each rank has its part of the sequence with all
heads, sends to each other rank the heads that this is to run, and has then the whole sequence with its part of the
heads; the output goes back the same way.

Source: Jacobs et al., "DeepSpeed Ulysses: System optimizations for enabling training of extreme long sequence
Transformer models" (2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from te_fuser.distributed.group import Group
from te_fuser.distributed.placement import Partial, Placement, Shard
from te_fuser.ops.attention.head_norm import HeadNorm
from te_fuser.ops.attention.head_parallel import OfHeads, OfPositions, SharedAttention
from te_fuser.ops.attention.heads import LAYOUTS, ApartHeads
from te_fuser.ops.attention.queries_apart import QueriesApart
from te_fuser.ops.base import FusableOperation
from te_fuser.ops.collectives import AllToAll
from te_fuser.ops.rotary_by_angles import RotaryByAngles
from te_fuser.ops.rotary_embedding import RotaryEmbedding
from te_fuser.ops.sharing import Context
from te_fuser.ops.structure import Fork, Take
from te_fuser.sharding.rules import RULES, ShardingContext, ShardingRule


class HeadsRule(ShardingRule[Any]):
    """Rule of ops on heads: as x, whose sequences are whole; ranks have whole heads."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        for argument, other in context.named.items():
            if other != x:
                raise ValueError(
                    f"{type(op).__name__}: x is {x} in the ranks of {context.group.title}, {argument} is {other}: make "
                    "both alike"
                )
        if x.by_rows or x == Partial():
            do = (
                "give it that group as its context, as parallelize(model, context=mesh['cp']) does"
                if x.outer
                else "a product before it with parallel_mode='column' and sequence_parallel=True gathers them"
            )
            raise ValueError(
                f"{type(op).__name__} takes whole sequences, and x is {x} in the ranks of {context.group.title}: {do}"
            )
        return x

    def local(self, op: Any, x: Placement, context: ShardingContext) -> FusableOperation:
        if x != Shard(-1) or op.heads_of_rank:
            return op  # type: ignore[no-any-return]
        ranks, counts = context.group.size, {"heads": op.heads, "kv_heads": op.kv_heads}
        for name, count in counts.items():
            if (count or 0) % ranks:
                raise ValueError(
                    f"{type(op).__name__}: {name}={count} cannot be cut into {ranks} equal parts, one for each "
                    f"rank of {context.group.title}: change one"
                )
        return op.with_attributes(**{name: count and count // ranks for name, count in counts.items()})  # type: ignore[no-any-return]


class EachHeadRule(HeadsRule):
    """Rule of ops on each head of a row: as x, whatever the sequences are."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        return super().gives(op, x, context) if x == Partial() else x


class PositionsRule(HeadsRule):
    """Rule of ops on positions: as x; ranks of its context have parts of the sequence."""

    def group(self, op: Any) -> Group:
        return op.context  # type: ignore[no-any-return]

    def takes(self, op: Any) -> Placement:
        return Shard(op.sequence_dim, outer=True, balanced=op.balanced)

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        if context.group != self.group(op):
            return super().gives(op, x, context)
        for name, given in {"x": x, **context.named}.items():
            if given != self.takes(op):
                raise ValueError(
                    f"{type(op).__name__} with the ranks of {context.group.title} as its context takes what is "
                    f"{self.takes(op)}, and {name} is {given}: let these ranks cut sequences alone"
                )
        return x


class RotaryRule(PositionsRule):
    """Rule of rotary ops: as x; rows turn by their place in the whole."""

    def gives(self, op: Any, x: Placement, context: ShardingContext) -> Placement:
        return x if x.outer and self.group(op).size == 1 else super().gives(op, x, context)

    def local(self, op: Any, x: Placement, context: ShardingContext) -> FusableOperation:
        if not (isinstance(x, Shard) and x.outer and x.dim == op.sequence_dim):
            return super().local(op, x, context)
        if getattr(op, "starts", None) is not None:
            raise ValueError(
                f"{type(op).__name__} turns by starts={op.starts!r}, and the ranks of {context.group.title} cut the "
                "sequence: leave one out"
            )
        return op.with_attributes(_context=Context(context.group, x.balanced))  # type: ignore[no-any-return]


class AttentionRule(PositionsRule):
    """Rule of attention: AllToAll around it where ranks cut sequences; keys and values apart are exchanged before.

    Learned sinks are cut as the heads are.
    """

    def gives(self, op: SharedAttention, x: Placement, context: ShardingContext) -> Placement:
        if context.group == self.group(op):
            _check_exchange(op)
        return super().gives(op, x, context)

    def local(self, op: SharedAttention, x: Placement, context: ShardingContext) -> FusableOperation:
        if x == Shard(-1) and op.scores.alibi is True:
            raise ValueError(
                f"{type(op).__name__}: its slopes are those of all heads, and each rank of {context.group.title} has "
                "some of these: give the slopes of this rank's heads, alibi_slopes"
            )
        return super().local(op, x, context)

    def local_ops(self, op: SharedAttention) -> tuple[FusableOperation, ...]:
        return (op,) if op.context.size == 1 else tuple(_exchanging(op))

    def cuts(self, op: SharedAttention) -> Mapping[str, tuple[int, Group]]:
        return {"sink": (0, op.sink_group)} if op.sink_group.size > 1 else {}

    def partial_gradients(self, op: SharedAttention, x: Placement, context: ShardingContext) -> tuple[str, ...]:
        return () if x == Shard(-1) else super().partial_gradients(op, x, context)

    def draws_for(self, op: SharedAttention, x: Placement, context: ShardingContext) -> Placement:
        """Probabilities of its heads."""
        return Shard(-1) if context.group == self.group(op) else x


def _exchanging(op: SharedAttention) -> Iterator[FusableOperation]:
    apart = op.packed.apart if isinstance(op.packed, ApartHeads) else None
    named = {} if apart is None else apart.names
    if named:
        yield Fork("exchanged_queries")
    for argument, name in named.items():
        yield Take(name)
        yield _to_heads(op, argument)
        yield Fork(f"exchanged_{argument}")
    if named:
        yield Take("exchanged_queries")
    yield _to_heads(op, "input")
    ranks = op.context.size
    whole: dict[str, Any] = {argument: f"exchanged_{argument}" for argument in named}
    others = {} if apart is None else {"packing": replace(apart, **whole)}
    own = {"heads": op.heads // ranks, "kv_heads": op.kv_heads // ranks, **others}
    yield op.with_attributes(_context=Context(), _heads_of=op.context, **own)
    yield AllToAll(op.context, op.sequence_dim, -1, balanced=op.balanced)


def _to_heads(op: SharedAttention, argument: str) -> AllToAll:
    """The exchange of an input; each of what lies side by side in it has all heads."""
    heads = op.packed
    parts: tuple[int, ...] = (1,)
    if isinstance(heads, ApartHeads):
        if argument == "key_value" and heads.apart.packing == "blocked":
            parts = heads.head_dim, heads.value_dim
    elif heads.packing == "blocked":
        parts = heads.heads, heads.kv_heads, heads.kv_heads
    return AllToAll(op.context, -1, op.sequence_dim, parts, op.balanced)


def _check_exchange(op: SharedAttention) -> None:
    """Refuse what cannot be exchanged; ValueError saying what to do."""
    who, ranks = f"{type(op).__name__} on {op.context}", op.context.size
    if op.kv_heads % ranks:
        raise ValueError(
            f"{who}: kv_heads={op.kv_heads} cannot be cut into {ranks} equal parts, one for each rank that cuts "
            "the sequence: take fewer ranks for the context, or more key/value heads"
        )
    if op.balanced and op.layout not in LAYOUTS:
        raise ValueError(
            f"{who}: of sequences one behind the other (qkv_format='thd') each rank has one block of all tokens, "
            "and balanced=True, which cp_group says, gives two: in place of cp_group take "
            "te_fuser.parallel.parallelize(model, context=group), of an op set balanced=False, or give samples of "
            "one length"
        )
    for what, is_asked in {"a bias": op.scores.bias, "ALiBi": op.scores.alibi is True}.items():
        if is_asked:
            raise ValueError(
                f"{who}: {what} is of all heads, and each rank of a context runs some of these: leave one out"
            )


RULES.add(HeadsRule(), OfHeads)
RULES.add(EachHeadRule(), HeadNorm, QueriesApart)
RULES.add(PositionsRule(), OfPositions)
RULES.add(RotaryRule(), RotaryEmbedding, RotaryByAngles)
RULES.add(AttentionRule(), SharedAttention)

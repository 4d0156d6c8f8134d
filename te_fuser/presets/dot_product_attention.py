"""DotProductAttention: queries, keys and values that are there already."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_fuser import ops
from te_fuser.ops.attention.heads import PACKINGS
from te_fuser.ops.checks import check_probability, finite_number
from te_fuser.presets.attention_base import ContextParallel, context_of
from te_fuser.presets.attention_call import ARGUMENTS, LAYOUTS, Asking, AttentionCall
from te_fuser.presets.base import Asked, cut, understands
from te_fuser.presets.keyword_arguments import (
    PlacementArguments,
    RandomState,
    check_call,
    check_flag,
    check_size,
    checked,
    default_device,
)
from te_fuser.presets.keyword_types import DotProductAttentionKeys, Unpack

KEYS = "keys "  # before a packing: of keys and values alone, which a cross attention has projected together
CACHES = "caches"  # in place of a packing: keys and values lie in the caches of the call
SINKS = {"vanilla": "none", "off-by-one": "zero", "learnable": "learned"}


def check_softcap(name: str, value: Any) -> float:
    """A bound of scores, or 0 for none. TypeError or ValueError for anything else."""
    if (found := finite_number("DotProductAttention", name, value)) < 0.0:
        raise ValueError(f"{name} is a bound of the scores, or 0 for none, got {value}")
    return found


@dataclass(frozen=True)
class ScoreArguments(PlacementArguments):
    """Heads, masks, and how scores become weights, as `DotProductAttention` says."""

    num_gqa_groups: int | None = None
    qkv_format: str = "sbhd"
    attn_mask_type: str = "causal"
    window_size: Any = None
    bottom_right_diagonal: bool | None = None
    softmax_scale: float | None = checked(None, functools.partial(finite_number, "DotProductAttention"))
    softmax_type: str = checked("vanilla", SINKS)
    softcap: float = checked(0.0, check_softcap)


@dataclass(frozen=True)
class DotProductAttentionArguments(ScoreArguments):
    """Keywords of `DotProductAttention`, documented there, and the layout of heads in the list of another preset.

    Attributes:
        set_parallel_mode: whether each rank of the group has its part of the heads.
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: see `ContextParallel.set_context_parallel_group`.
    """

    layer_number: int | None = checked(None, check_size)
    attention_type: str = checked("self", ("self", "cross"))
    get_rng_state_tracker: Callable[[], Any] | None = None
    rng_tracker_name: str | None = None
    set_parallel_mode: bool = True
    cp_group: Any = None
    cp_global_ranks: Any = None
    cp_stream: Any = None
    cp_comm_type: str | None = None
    packing: str = "apart"
    prefix: str = ""

    def call(self) -> AttentionCall:
        """The call that changes nothing."""
        masked = (self.attn_mask_type, self.window_size, self.bottom_right_diagonal)
        return AttentionCall.of(*masked, self.qkv_format, self.prefix)


class DotProductAttention(ContextParallel):
    """softmax(q k^T * scale, masked) v for each head; a row that sees nothing gives zeros.

    In a list it reads queries [S, B, heads * channels], and keys and values as `key_layer` and `value_layer`.

    Args:
        num_attention_heads: heads of the queries.
        kv_channels: features of a head, or (of keys, of values).
        num_gqa_groups: heads of keys and values; None: as many as of queries.
        attention_dropout: probability that a softmax probability is dropped, in training.
        qkv_format: "sbhd" [S, B, H, D], "bshd", or "thd": sequences one behind the other, by `cu_seqlens_q`.
        attn_mask_type: "no_mask", "causal", "padding", "padding_causal", "causal_bottom_right",
            "padding_causal_bottom_right" or "arbitrary".
        window_size: (left, right), the positions that a query sees on each side; -1: all.
        bottom_right_diagonal: True aligns the last query with the last key, False the first ones; None: as the mask
            type says.
        softmax_scale: None: 1 / sqrt(channels).
        softmax_type: "vanilla"; "off-by-one" adds a logit of 0 to each row, "learnable" the parameter `softmax_offset`
            [heads]. The attribute is zeros with "off-by-one", None with "vanilla".
        softcap: scores become softcap * tanh(scores / softcap); 0: no cap.
        layer_number: the layer's number in the model, from 1 on: selects its caches in `InferenceParams`.
        attention_type: "self" or "cross".
        cp_group, cp_global_ranks, cp_stream, cp_comm_type: ranks that cut the sequences, see
            `set_context_parallel_group`.
        **keywords: these, where parameters are, see `te_fuser.presets.keyword_arguments.PlacementArguments`, and
            options of lists.
    """

    flattens = True
    arguments = DotProductAttentionArguments

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        qkv_format: str = "sbhd",
        attn_mask_type: str = "causal",
        **keywords: Unpack[DotProductAttentionKeys],
    ) -> None:
        super().__init__(
            num_gqa_groups=num_gqa_groups, qkv_format=qkv_format, attn_mask_type=attn_mask_type, **keywords
        )
        said = self.common
        self._context = context_of(type(self).__name__, said.cp_group, said.cp_global_ranks, said.cp_comm_type)
        self.common = said = replace(said, cp_group=None, cp_stream=None)  # which no pickle takes
        channels = kv_channels if isinstance(kv_channels, (tuple, list)) else (kv_channels, kv_channels)
        if len(channels) != 2:
            raise ValueError(f"kv_channels is a size, or (of keys, of values), got {kv_channels!r}")
        self.channels = tuple(check_size("kv_channels", size) for size in channels)
        self.hidden_size_per_attention_head_k, self.hidden_size_per_attention_head_v = self.channels
        self.num_attention_heads = check_size("num_attention_heads", num_attention_heads)
        self.num_gqa_groups = groups_of(num_attention_heads, num_gqa_groups)
        self.attention_dropout = check_probability(attention_dropout, "attention_dropout")
        self.layer_number = said.layer_number
        self.softmax_scale = self.channels[0] ** -0.5 if said.softmax_scale is None else said.softmax_scale
        cross = said.attention_type == "cross"
        self.asking = Asking(type(self).__name__, said.call(), True, self.softmax_scale, cross)
        if said.softmax_type == "learnable":
            self.declare("softmax_offset", [self.own_heads[0]], 0.0, **cut(0, bool(said.set_parallel_mode)))
        else:
            zeros = said.softmax_type == "off-by-one"
            self.softmax_offset = torch.zeros(self.own_heads[0], device=default_device(said.device)) if zeros else None
        self.num_gqa_groups_per_partition = self.own_heads[1]
        self.reset_parameters()
        self.relist()

    def variant_ops(  # type: ignore[override]
        self, call: AttentionCall | None = None, packing: str | None = None
    ) -> Iterator[ops.FusableOperation]:
        """The op of a call, with heads packed as it says."""
        call = call or self.asking.default
        softmax, packing = SINKS[self.common.softmax_type], packing or self.common.packing
        packed = packing in PACKINGS
        heads, groups = self.own_heads
        op = ops.DotProductAttention(
            heads,
            self.channels[0],
            kv_heads=groups,
            mask=call.hides(not packed),
            dropout=self.attention_dropout,
            scale=self.softmax_scale,
            layout=LAYOUTS[call.qkv_format],
            packing=packing if packed else self._apart(packing),
            scores=call.scores(self.common.softcap, softmax),
        )
        op.random_state = RandomState.of(self.common)
        self.with_own_heads(op)
        if softmax == "learned" and op.heads_of_rank:
            op.sink_group = self._group
        yield ops.Bound(op, self, sink="softmax_offset") if softmax == "learned" else op

    @property
    def own_heads(self) -> tuple[int, int]:
        """Number of heads of queries, and of keys and values, on this rank."""
        if not self.common.set_parallel_mode:
            return self.num_attention_heads, self.num_gqa_groups
        heads = self.share(self.num_attention_heads, "num_attention_heads")
        return heads, self.share(self.num_gqa_groups, "num_gqa_groups")

    def with_own_heads(self, op: ops.OfHeads) -> ops.OfHeads:
        """An op that was made for `own_heads`, on sequences that ranks cut as this preset's."""
        op.heads_of_rank = self.tp_size > 1 and bool(self.common.set_parallel_mode)
        if isinstance(op, ops.OfPositions):
            op.context, op.balanced = self._context.group, self._context.balanced
        return op

    def _apart(self, packing: str) -> ops.Apart:
        if packing == CACHES:
            return ops.Apart("key_cache", "value_cache", value_dim=self.channels[1])
        if packing == "apart":
            return ops.Apart("key_layer", "value_layer", value_dim=self.channels[1])
        return ops.Apart(key_value="key_value", packing=packing.removeprefix(KEYS), value_dim=self.channels[1])

    @understands
    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor | None = None,
        value_layer: torch.Tensor | None = None,
        attention_mask: Any = None,
        *,
        checkpoint_core_attention: bool = False,
        inference_params: Any = None,
        **call: Any,
    ) -> Asked:
        """[S, B, heads * channels of values], in the order of qkv_format.

        Args:
            query_layer, key_layer, value_layer: [S, B, H, D] in the order of qkv_format; keys and values may have
                another length. Inside of another preset's list keys and values are left out, and queries are packed as
                the projections before give them.
            attention_mask: boolean, True = hidden, for a type of mask that reads it.
            checkpoint_core_attention: changes nothing: backward computes the probabilities again in any case.
            **call: qkv_format, attn_mask_type, window_size, bottom_right_diagonal in place of the constructor's;
                core_attention_bias_type and core_attention_bias, alibi_slopes; cu_seqlens_q and cu_seqlens_kv.

        Raises:
            TypeError, ValueError, RuntimeError: for what the preset was not made for, before anything runs.
        """
        self.check_group()
        if key_layer is None and self.common.packing != "apart":
            check_call(self, call)
            masked = {} if attention_mask is None else {"attention_mask": attention_mask}
            return Asked(self, query_layer, {**masked, **call})
        who, outputs = type(self).__name__, call.pop("outputs", ())
        check_call(self, call, ARGUMENTS)
        check_flag("checkpoint_core_attention", checkpoint_core_attention)
        if inference_params is not None:
            raise NotImplementedError(f"{who}: caches are those of MultiheadAttention: give inference_params there")
        how, tensors = self.asking.understood({"attention_mask": attention_mask, **call})
        rows = 1 if how.qkv_format == "thd" else 2
        x, key, value = self._flat(rows, query_layer, key_layer, value_layer)
        usual = how == self.asking.default and self.common.packing == "apart"
        variant = {} if usual else {"call": how, "packing": "apart"}
        return self.answer(variant, x, {"outputs": outputs, "key_layer": key, "value_layer": value, **tensors})

    def _flat(self, rows: int, query: Any, key: Any, value: Any) -> list[torch.Tensor]:
        """Heads as features of a row."""
        heads, groups = self.own_heads
        sizes = ((heads, self.channels[0]), (groups, self.channels[0]), (groups, self.channels[1]))
        flat = []
        for name, t, size in zip(("query_layer", "key_layer", "value_layer"), (query, key, value), sizes, strict=True):
            if not isinstance(t, torch.Tensor):
                raise TypeError(f"{type(self).__name__}: {name} takes a tensor, got {type(t).__name__}")
            if t.dim() == rows + 2 and t.shape[rows:] != size:
                raise ValueError(
                    f"{type(self).__name__}: {name} has {t.shape[-2]} heads of {t.shape[-1]} channels, the preset was "
                    f"made for {size[0]} of {size[1]}: got {list(t.shape)}"
                )
            flat.append(t.flatten(rows) if t.dim() == rows + 2 else t)
        return flat


def groups_of(heads: int, groups: int | None) -> int:
    """Heads of keys and values, for so many of queries."""
    found = check_size("num_gqa_groups", heads if groups is None else groups)
    if heads % found:
        raise ValueError(f"num_gqa_groups={groups} does not divide num_attention_heads={heads}: give a divisor")
    return found

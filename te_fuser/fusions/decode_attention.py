"""Decoding on CUDA: KeyValueCache as one kernel, and DotProductAttention of one position to keys that are apart.

What no call changes is asked while planning. Caches that the kernel cannot reach are written by PyTorch's operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.declaration import chosen
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.kernels import decode_attention as kernels
from te_fuser.kernels.decode_attention import CacheWrite, OneQuery
from te_fuser.ops.attention.dot_product_attention import APART_KEYS, AttentionSettings, DotProductAttention
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.mask import HIDDEN_BY
from te_fuser.ops.base import OpCall
from te_fuser.ops.key_value_cache import KeyValueCache

Body = Callable[[FusionCall, torch.Tensor], torch.Tensor]
_CACHES = ("key_cache", "value_cache", "starts", "counts")
_TOLD = (APART_KEYS, HIDDEN_BY[0], HIDDEN_BY[2], HIDDEN_BY[3])  # lengths of samples, a window, a corner

# ---------------------------------------------------------------------------------------------------------- caches


def _cache_write(m: Match) -> CacheWrite:
    op = cast(KeyValueCache, m[0].op)
    whole = m[0].inputs["starts"].dtype
    return CacheWrite(op.head_dim, op.kv_heads, op.heads // op.kv_heads, op.packing, m.dtype, whole)


def _why_not_cached(m: Match) -> str | None:
    """Reason against the kernel for a match; None where it fits."""
    starts, counts = (m[0].inputs[name].dtype for name in ("starts", "counts"))
    why = m.why_no_cuda()
    if why is None and starts != counts:
        why = f"it takes starts and counts of one dtype, they are {text_of(starts)} and {text_of(counts)}"
    return why or kernels.why_not_cached(m[0].head_dim, m.dtype)


@functools.lru_cache(maxsize=512)
def _put(kernel: CacheWrite, layout: str) -> Body:
    heads, sequence_first = kernel.kv_heads * kernel.per_group, layout == "sequence_first"
    plain = KeyValueCache(kernel.head_dim, heads=heads, kv_heads=kernel.kv_heads, layout=layout, packing=kernel.packing)

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        given = {name: m[f"0.{name}"] for name in _CACHES}
        if not kernels.can_reach(given["key_cache"], given["value_cache"]):
            return plain.op_forward(OpCall({**given, "input": x}), x)
        return kernels.put(kernel, x.detach(), **given, sequence_first=sequence_first)

    return forward


chosen(
    "key_value_cache",
    "forward",
    [KeyValueCache],
    "One pass that writes keys and values, and gives the queries.",
    when=lambda m: _why_not_cached(m) or True,
    cost=lambda m: Cost(m.x.nbytes, m.x.nbytes),
    choose=lambda m, method: _put(_cache_write(m), m[0].layout),
    compiles=lambda m, direction, needed: [_cache_write(m)],
)

# ------------------------------------------------------------------------------------------------------- attention


def _settings(m: Match) -> AttentionSettings:
    return cast(DotProductAttention, m[0].op).settings()


def _one_query(m: Match) -> OneQuery:
    settings = _settings(m)
    heads, (left, _) = settings.heads, settings.mask.sides
    return OneQuery(heads.head_dim, heads.kv_heads, heads.per_group, m.dtype, settings.scale, left)


def _why_not_one_query(m: Match) -> str | None:
    """Reason against the kernel for a match; None where it fits."""
    if m.needs_grad:
        return "it has no backward"
    settings = _settings(m)
    heads = settings.heads
    if not isinstance(heads, ApartHeads) or "key_value" in heads.apart.names:
        return "it reads keys and values from two inputs, and queries from a third"
    others = [words for words in settings.beyond if words not in _TOLD]
    if others or settings.masked:
        return f"it is not called for {' and '.join(others) or 'a boolean mask'}"
    if m[0].op.draws():
        return "it drops no probabilities"
    if heads.value_dim != heads.head_dim:
        return f"heads of values have {heads.value_dim} features, those of keys {heads.head_dim}"
    return kernels.why_not_one_query(heads.head_dim, m.dtype) or _why_not_these_inputs(m, settings)


def _why_not_these_inputs(m: Match, settings: AttentionSettings) -> str | None:
    inputs, mask = m[0].inputs, settings.mask
    apart = {inputs[name].dtype for name in ("key", "value")} - {m.dtype}
    if apart:
        return f"queries are {text_of(m.dtype)}, keys or values {', '.join(map(text_of, apart))}"
    if mask.is_banded and mask.corner != "bottom_right":
        return "its query stands at the last key: take corner='bottom_right'"
    if len(m.x.shape) != 3:
        return f"it takes [1, samples, features] or [samples, 1, features], there is {list(m.x.shape)}"
    _, positions = settings.heads.lengths(m.x.shape)
    return None if positions == 1 else "it takes one query of each sample, there are several"


@functools.lru_cache(maxsize=512)
def _attend(kernel: OneQuery, settings: AttentionSettings) -> Body:
    mask, sequence_first = settings.mask, settings.heads.layout == "sequence_first"

    def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        counts = m["0.lengths"] if mask.lengths else None, m["0.key_lengths"] if mask.key_lengths else None
        return kernels.attend(kernel, x, m["0.key"], m["0.value"], sequence_first, *counts)

    return forward


chosen(
    "one_query_attention",
    "forward",
    [DotProductAttention],
    "Attention of one position a sample, over parts of the keys side by side.",
    when=lambda m: m.why_no_cuda() or _why_not_one_query(m) or True,
    cost=lambda m: Cost(2.0 * m[0].inputs["key"].nbytes, m.x.nbytes, launches=2),  # keys and values
    choose=lambda m, method: _attend(_one_query(m), _settings(m)),
    compiles=lambda m, direction, needed: [_one_query(m)],
)

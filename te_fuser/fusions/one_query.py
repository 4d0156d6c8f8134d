"""DotProductAttention of one position to keys that are apart, as when a token is decoded, by kernels of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch

from te_fuser.dtypes import text_of
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.kernels import one_query
from te_fuser.kernels.one_query import OneQuery
from te_fuser.ops.attention.dot_product_attention import APART_KEYS, DotProductAttention
from te_fuser.ops.attention.heads import ApartHeads
from te_fuser.ops.attention.mask import HIDDEN_BY

_SAMPLES, _WINDOW, _CORNER = HIDDEN_BY[0], HIDDEN_BY[2], HIDDEN_BY[3]


def _op(m: Match) -> DotProductAttention:
    return cast(DotProductAttention, m[0].op)


def _kernel(m: Match) -> OneQuery:
    settings = _op(m).settings()
    heads = settings.heads
    left, _ = settings.mask.sides
    return OneQuery(heads.head_dim, heads.kv_heads, heads.per_group, m.dtype, settings.scale, left)


def _why_not(m: Match) -> str | None:
    """Why the kernel is none for a match; None where it is."""
    if m.needs_grad:
        return "it has no backward"
    settings = _op(m).settings()
    heads = settings.heads
    if not isinstance(heads, ApartHeads) or "key_value" in heads.apart.names:
        return "it reads keys and values from two inputs, and queries from a third"
    others = [words for words in settings.beyond if words not in (APART_KEYS, _SAMPLES, _WINDOW, _CORNER)]
    if others or settings.masked:
        return f"it is not called for {' and '.join(others) or 'a boolean mask'}"
    if _op(m).draws():
        return "it drops no probabilities"
    if heads.value_dim != heads.head_dim:
        return f"heads of values have {heads.value_dim} features, those of keys {heads.head_dim}"
    return one_query.reason_not(heads.head_dim, m.dtype) or _why_not_these_inputs(m)


def _why_not_these_inputs(m: Match) -> str | None:
    settings, inputs = _op(m).settings(), m[0].inputs
    apart = {inputs[name].dtype for name in ("key", "value")} - {m.dtype}
    if apart:
        return f"queries are {text_of(m.dtype)}, keys or values {', '.join(map(text_of, apart))}"
    mask = settings.mask
    if mask.is_banded and mask.corner != "bottom_right":
        return "its query stands at the last key: take corner='bottom_right'"
    if len(m.x.shape) != 3:
        return f"it takes [1, samples, features] or [samples, 1, features], there is {list(m.x.shape)}"
    _, positions = settings.heads.lengths(m.x.shape)
    return None if positions == 1 else "it takes one query of each sample, there are several"


class _DecodeAttention:
    """The body: what no call changes is asked while planning."""

    def __init__(self, kernel: OneQuery, sequence_first: bool, lengths: bool, key_lengths: bool) -> None:
        self._kernel, self._sequence_first = kernel, sequence_first
        self._names = ["0.lengths"] * lengths, ["0.key_lengths"] * key_lengths

    def forward(self, m: FusionCall, x: torch.Tensor) -> torch.Tensor:
        """The output."""
        lengths, key_lengths = (m[names[0]] if names else None for names in self._names)
        return one_query.attend(self._kernel, x, m["0.key"], m["0.value"], self._sequence_first, lengths, key_lengths)


_body = functools.lru_cache(maxsize=512)(_DecodeAttention)


def _choose(m: Match, method: str) -> Callable[..., Any]:
    settings = _op(m).settings()
    mask = settings.mask
    made = _body(
        _kernel(m), settings.heads.layout == "sequence_first", mask.lengths is not None, mask.key_lengths is not None
    )
    return made.forward


@fusion(
    forward=[DotProductAttention],
    when=lambda m: m.why_no_cuda() or _why_not(m) or True,
    cost=lambda m: Cost(2.0 * m[0].inputs["key"].nbytes, m.x.nbytes, launches=2),  # keys and values
    details=Details(choose=_choose, compiles=lambda m, direction, needed: [_kernel(m)]),
)
def one_query_attention(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
    """Attention of one position a sample, over parts of the keys side by side."""
    raise NotImplementedError  # `choose` gives what runs

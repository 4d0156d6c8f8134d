"""Attentions that hide by structure or bound their scores, with inputs, and their values and gradients by provider."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from te_fuser import ops
from te_fuser.ops.attention.heads import inputs_of
from te_fuser.ops.base import OpCall
from tests.twins import tensor

Mask = ops.AttentionMask
Tensors = dict[str, torch.Tensor]
BOTTOM = {"causal": True, "corner": "bottom_right"}
LENGTHS = {"lengths": "lengths"}
BOTH = {"lengths": "lengths", "key_lengths": "key_lengths"}
OFFSETS = {"offsets": "offsets"}

# Of packed heads [3, 7], keys and values apart [3, 7] and [3, 5], and tokens [11].
PACKED: Mapping[str, Mask] = {
    "window": Mask(window=(2, 1)),
    "causal window": Mask(causal=True, window=(2, None)),
    "left alone": Mask(window=(0, None)),
    "right alone": Mask(window=(None, 2)),
    "bottom right": Mask(**BOTTOM),
    "lengths": Mask(**LENGTHS),
    "causal lengths": Mask(causal=True, **LENGTHS),
    "window and lengths": Mask(window=(1, 1), **LENGTHS),
}
APART: Mapping[str, Mask] = {
    "none": Mask(),
    "window": Mask(window=(2, 1), corner="bottom_right"),
    "bottom right": Mask(**BOTTOM),
    "lengths of both": Mask(**BOTH),
    "of queries": Mask(**LENGTHS),
    "of keys": Mask(key_lengths="key_lengths"),
    "causal, of both": Mask(**BOTTOM, **BOTH),
    "causal, of one name": Mask(causal=True, lengths="lengths", key_lengths="lengths"),
    "causal, of keys": Mask(**BOTTOM, key_lengths="key_lengths"),
}
TOKENS: Mapping[str, Mask] = {
    "offsets": Mask(**OFFSETS),
    "causal": Mask(causal=True, **OFFSETS),
    "window": Mask(causal=True, window=(2, None), **OFFSETS),
    "no longer than": Mask(causal=True, longest=5, **OFFSETS),
    "padded": Mask(causal=True, **OFFSETS, **LENGTHS),
    "padded, no longer than": Mask(**OFFSETS, **LENGTHS, longest=5),
}
TOKENS_APART: Mapping[str, Mask] = {
    "same offsets": Mask(causal=True, **OFFSETS),
    "own offsets": Mask(**OFFSETS, key_offsets="key_offsets"),
    "bottom right": Mask(**BOTTOM, **OFFSETS, key_offsets="key_offsets"),
    "own offsets, no longer than": Mask(**OFFSETS, key_offsets="key_offsets", longest=5),
    "padded": Mask(**BOTTOM, **OFFSETS, key_offsets="key_offsets", **BOTH),
}
Case = tuple[str, ops.DotProductAttention, Tensors]


def cases(dim: int = 8, dtype: torch.dtype = torch.float64, times: int = 1, **scores: object) -> Iterator[Case]:
    """(name, op, its inputs by argument); positions are `times` as many."""
    extra = {"scores": ops.AttentionScores(**scores)} if scores else {}
    for masks, layouts, apart in (
        (PACKED, ("batch_first", "sequence_first"), False),
        (APART, ("batch_first", "sequence_first"), True),
        (TOKENS, ("tokens",), False),
        (TOKENS_APART, ("tokens",), True),
    ):
        for k, (name, mask) in enumerate(masks.items()):
            layout, kv_heads = layouts[k % len(layouts)], (4, 2)[k // 2 % 2]
            mask = replace(mask, longest=mask.longest and mask.longest * times)
            packing = "apart" if apart else ("blocked", "interleaved")[k % 2]
            op = ops.DotProductAttention(4, dim, kv_heads=kv_heads, mask=mask, layout=layout, packing=packing, **extra)
            yield f"{layout}, {packing}: {name}", op.to(dtype), inputs_for(op, dtype, times)


def inputs_for(op: ops.DotProductAttention, dtype: torch.dtype, times: int = 1, seed: int = 0) -> Tensors:
    """Its main input and those that it names."""
    tokens = op.layout == "tokens"
    kv, dim = op.kv_heads, op.head_dim
    rows = _rows(op, (11 if tokens else 7) * times)
    found = {"input": tensor(*rows, op.packed.features, dtype=dtype, seed=seed).detach()}
    for k, name in enumerate(inputs_of(op.packed)[1:]):
        same = tokens and not op.hides.key_offsets
        keys = 11 if same else 13 if tokens else 5
        found[name] = tensor(*_rows(op, keys * times), kv * dim, dtype=dtype, seed=seed + k + 1).detach()
    counts = {
        "offsets": [0, 4, 4, 9],
        "key_offsets": [0, 2, 7, 12],
        "lengths": [3, 0, 4] if tokens else [7, 0, 3],
        "key_lengths": [2, 3, 0] if tokens else [2, 5, 0],
    }
    if op.hides.lengths and op.hides.lengths == op.hides.key_lengths:
        counts |= {"lengths": [5, 0, 3], "key_lengths": [5, 0, 3]}
    for argument in op.hides.names:
        found[argument] = torch.tensor(counts[argument], dtype=torch.int64) * times
    return found


def _rows(op: ops.DotProductAttention, positions: int) -> tuple[int, ...]:
    return {"tokens": (positions,), "batch_first": (3, positions), "sequence_first": (positions, 3)}[op.layout]


@torch.no_grad()
def by_op(op: ops.DotProductAttention, tensors: Tensors, dy: torch.Tensor) -> Tensors:
    """The output and all gradients by the op's own math."""
    sink = {} if op.sink is None else {"sink": op.sink.detach()}
    call = OpCall({**tensors, **sink})
    y = op.op_forward(call, tensors["input"])
    found = op.op_backward(OpCall({**tensors, **sink, **call.emitted}), dy)
    dx, others = found if isinstance(found, tuple) else (found, {})
    return {"output": y, "input": dx, **others}


@torch.no_grad()
def by_provider(provider: object, op: ops.DotProductAttention, tensors: Tensors, dy: torch.Tensor) -> Tensors:
    """Output and all gradients by a provider."""
    sink = {} if op.sink is None else {"sink": op.sink.detach()}
    known = {**tensors, **sink}
    y, saved = provider.forward(op.settings(), known)
    assert tuple(saved) == provider.emits
    return {"output": y, **provider.backward(op.settings(), {**known, "output": y, **saved}, dy)}


def output_gradient(op: ops.DotProductAttention, tensors: Tensors) -> torch.Tensor:
    """One for the output."""
    x = tensors["input"]
    return tensor(*x.shape[:-1], op.heads * op.packed.value_dim, dtype=x.dtype, seed=99).detach()

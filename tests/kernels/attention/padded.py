"""Attentions with padding by boolean tensors, and masks that hide the end of samples, or anything."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from te_fuser import ops
from te_fuser.ops.attention.heads import inputs_of
from te_fuser.ops.attention.mask import AttentionMask
from tests.twins import tensor

B, S, K = 5, 7, 6
ONE, TWO = {"padding": "pad"}, {"padding": "pad", "key_padding": "keys"}
SAME = {"padding": "pad", "key_padding": "pad"}
KINDS = ("end", "begin", "nothing", "anywhere")
LAYOUTS = ("batch_first", "sequence_first")
MASKS: Mapping[str, tuple[AttentionMask, str]] = {
    "packed": (AttentionMask(**ONE), "interleaved"),
    "packed, causal": (AttentionMask(causal=True, **ONE), "blocked"),
    "apart, causal": (AttentionMask(causal=True, **SAME), "apart"),
    "apart, from the last": (AttentionMask(causal=True, corner="bottom_right", **SAME), "apart"),
    "apart": (AttentionMask(**TWO), "apart"),
    "keys alone": (AttentionMask(key_padding="keys"), "apart"),
}
Tensors = dict[str, torch.Tensor]


def mask_of(kind: str, positions: int, seed: int = 0) -> torch.Tensor:
    """[B, 1, 1, positions]."""
    at = torch.arange(positions)
    counts = torch.tensor([positions, positions // 2, 0, positions - 2, 1])[:, None]
    found = {
        "end": at >= counts,
        "begin": at < counts,
        "nothing": (at < 0).expand(B, -1),
        "anywhere": torch.rand(B, positions, generator=torch.Generator().manual_seed(seed)) < 0.4,
    }[kind]
    return found[:, None, None].contiguous()


def case(
    name: str, layout: str, kind: str, dim: int = 8, times: int = 1, dtype: torch.dtype = torch.float64
) -> tuple[ops.DotProductAttention, Tensors]:
    """The op, and its inputs by argument; positions are `times` as many."""
    mask, packing = MASKS[name]
    op = ops.DotProductAttention(4, dim, kv_heads=2, mask=mask, layout=layout, packing=packing).to(dtype)
    alike = mask.key_padding == mask.padding
    positions, keys = S * times, (S if alike else K) * times
    tensors = {}
    for k, name in enumerate(inputs_of(op.packed)):
        rows = (B, positions if name == "input" else keys)
        features = op.packed.features if name == "input" else 2 * dim
        shape = rows if layout == "batch_first" else rows[::-1]
        tensors[name] = tensor(*shape, features, dtype=dtype, seed=k).detach()
    if mask.padding:
        tensors["padding"] = mask_of(kind, positions)
    if mask.key_padding:
        tensors["key_padding"] = tensors["padding"] if alike else mask_of(kind, keys, seed=1)
    return op, tensors

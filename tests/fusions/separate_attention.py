"""Models around an attention whose keys and values are apart, or that hides by structure, with their inputs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping

import torch

from te_fuser import Sequential, ops
from tests.twins import sequential, tensor

MASKS: Mapping[str, ops.AttentionMask] = {
    "none": ops.AttentionMask(),
    "causal": ops.AttentionMask(causal=True),
    "bottom_right": ops.AttentionMask(causal=True, corner="bottom_right"),
    "window": ops.AttentionMask(window=(3, 1)),
    "causal_window": ops.AttentionMask(causal=True, window=(2, None), corner="bottom_right"),
    "lengths": ops.AttentionMask(lengths="lengths", key_lengths="key_lengths"),
    "given": ops.AttentionMask(causal=True, given="hide", key_lengths="key_lengths"),
}
Case = tuple[str, Sequential, torch.Tensor, dict[str, torch.Tensor]]


def cases(
    head_dim: int = 4, dtype: torch.dtype = torch.float64, sizes: tuple[int, int] = (7, 5), every: bool = False
) -> Iterator[Case]:
    """(name, model, x, named inputs): each mask with each way to give keys and values; if not `every`, in one layout
    and grouping of heads, which take turns so that each pair of all four is there."""
    settings = (("batch_first", 4), ("sequence_first", 2), ("batch_first", 2), ("sequence_first", 4))
    ways = [(a, b, *c) for a, b, c in itertools.product(MASKS, ("key", "interleaved", "blocked"), settings)]
    turns = ways if every else [ways[4 * k + sum(divmod(k, 3)) % 4] for k in range(len(ways) // 4)]
    for k, (mask, way, layout, kv_heads) in enumerate(turns):
        apart = ops.Apart() if way == "key" else ops.Apart(key_value="memory", packing=way)
        op = ops.DotProductAttention(4, head_dim, kv_heads=kv_heads, mask=MASKS[mask], layout=layout, packing=apart)
        model = sequential(ops.Linear(6, 4 * head_dim), op, ops.Linear(4 * head_dim, 6), dtype=dtype)
        names = {"key": kv_heads, "value": kv_heads} if way == "key" else {"memory": 2 * kv_heads}
        yield f"{mask} {way} {layout} {kv_heads}", model, *_inputs(op, names, layout, sizes, dtype, k)


def _inputs(
    op: ops.DotProductAttention,
    names: dict[str, int],
    layout: str,
    sizes: tuple[int, int],
    dtype: torch.dtype,
    seed: int,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    samples, (queries, keys) = 3, sizes
    shape = (lambda n: (samples, n)) if layout == "batch_first" else (lambda n: (n, samples))
    found = {
        n: tensor(*shape(keys), heads * op.head_dim, dtype=dtype, seed=seed + k)
        for k, (n, heads) in enumerate(names.items())
    }
    known = {
        "lengths": torch.tensor([queries, 0, queries // 2]),
        "key_lengths": torch.tensor([keys // 2, keys, 0], dtype=torch.int32),
        "hide": torch.rand(samples, 1, queries, keys, generator=torch.Generator().manual_seed(seed)) < 0.3,
    }
    read = {given.name for given in op.named_inputs().values()}
    return tensor(*shape(queries), 6, dtype=dtype), found | {n: t for n, t in known.items() if n in read}


def tokens(packing: str, head_dim: int = 4, dtype: torch.dtype = torch.float64) -> Case:
    """Sequences one behind the other; the second is empty, and two tokens are of none."""
    mask = ops.AttentionMask(causal=True, offsets="cu_seqlens", window=(3, 0))
    op = ops.DotProductAttention(4, head_dim, kv_heads=2, mask=mask, layout="tokens", packing=packing)
    model = sequential(ops.Linear(6, op.packed.features), op, ops.Linear(4 * head_dim, 6), dtype=dtype)
    others = ("key", "value") if packing == "apart" else ()
    inputs = {n: tensor(11, 2 * head_dim, dtype=dtype, seed=k) for k, n in enumerate(others)}
    return packing, model, tensor(11, 6, dtype=dtype), {**inputs, "cu_seqlens": torch.tensor([0, 4, 4, 9])}

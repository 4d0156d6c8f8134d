"""Models around an attention whose backward stores its gradient packed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from te_fuser import Sequential, ops
from tests.twins import sequential, tensor


def projected(
    layout: str, packing: str, rope: bool, kinds: Sequence[tuple[str, int]]
) -> Iterator[tuple[Sequential, torch.Tensor]]:
    """For each (mask, kv_heads): a projection, maybe a rotation, 4 heads of 8 features, a projection; and its input.

    Left out is where there are no strides for the packed gradient.
    """
    for mask, kv_heads in kinds:
        if (layout, packing, kv_heads) == ("batch_first", "interleaved", 2):
            continue
        common = {"heads": 4, "kv_heads": kv_heads, "layout": layout, "packing": packing}
        op = ops.DotProductAttention(head_dim=8, mask=mask, **common)  # type: ignore[arg-type]
        rotation = [ops.RotaryEmbedding(8, **common)] if rope else []  # type: ignore[arg-type]
        yield sequential(ops.Linear(6, op.packed.features), *rotation, op, ops.Linear(32, 6)), tensor(5, 3, 6)

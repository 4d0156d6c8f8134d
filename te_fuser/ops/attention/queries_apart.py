"""QueriesApart: queries, and beside them the keys and values that are packed with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from te_fuser.ops.attention.head_parallel import OfHeads
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.ops.base import OpCall, Spec
from te_fuser.ops.checks import check_features


class QueriesApart(OfHeads):
    """Separate packed heads: y = q, and `key_value` for an attention with `Apart(key_value="key_value", packing=..)`.

    Keys may then have other lengths or offsets than the queries that they were projected with.

    Args:
        head_dim: features of one head.
        heads: query heads.
        kv_heads: key and value heads.
        packing: "interleaved" or "blocked", of x and of `key_value`, see `PackedHeads` and `Apart`.

    Raises:
        ValueError: for counts that do not fit, or when x has another feature size.
    """

    reads = ()
    values = ("key_value",)

    def __init__(self, head_dim: int, *, heads: int, kv_heads: int, packing: str = "interleaved") -> None:
        super().__init__()
        self.head_dim, self.heads, self.kv_heads, self.packing = head_dim, heads, kv_heads, packing
        self._heads()

    def _heads(self) -> PackedHeads:
        return PackedHeads(self.heads, self.kv_heads, self.head_dim, packing=self.packing)

    def infer(self, x: Spec) -> Mapping[str, Spec]:
        """Specs of both outputs, by features alone."""
        check_features(self, x, self._heads().features)
        sizes = {"output": self.heads * self.head_dim, "key_value": 2 * self.kv_heads * self.head_dim}
        return {name: replace(x, shape=(*x.shape[:-1], size)) for name, size in sizes.items()}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = self._by_group(x, self.heads + 2 * self.kv_heads).split(self._counts, -2)
        made = (part.clone(memory_format=torch.contiguous_format).flatten(-3) for part in parts)
        return dict(zip(("output", "key_value"), made, strict=True))

    def op_backward(self, call: OpCall, dy: torch.Tensor | None) -> torch.Tensor:
        given, sizes = (dy, call.get("d_key_value")), (self.heads, 2 * self.kv_heads)
        lead, like = next((t.shape[:-1], t) for t in given if t is not None)
        whole = [
            like.new_zeros(*lead, count * self.head_dim) if t is None else t
            for t, count in zip(given, sizes, strict=True)
        ]
        parts = [self._by_group(t, count) for t, count in zip(whole, sizes, strict=True)]
        return torch.cat(parts, -2).reshape(*lead, self._heads().features)

    @property
    def _counts(self) -> list[int]:
        """Heads of a group: queries, and keys with values."""
        return [self.heads // self._groups, 2 * self.kv_heads // self._groups]

    @property
    def _groups(self) -> int:
        return self.kv_heads if self.packing == "interleaved" else 1

    def _by_group(self, t: torch.Tensor, count: int) -> torch.Tensor:
        """Reshape so many heads to [.., groups, heads of a group, head_dim]."""
        return t.reshape(*t.shape[:-1], self._groups, count // self._groups, self.head_dim)

"""Attention, and a branch beside a residual stream, as torch modules that say by `as_ops` what they are."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from te_fuser import ops
from te_fuser.sequential import Residual


class TorchAttention(torch.nn.Module):
    """What an attention op on packed queries, keys and values computes, in torch's functions.

    Raises:
        NotImplementedError: for what these do not say: masks of a call, windows, other functions of scores.
    """

    def __init__(self, op: ops.FusableOperation) -> None:
        super().__init__()
        if not isinstance(op, ops.DotProductAttention) or op.scores != ops.AttentionScores():
            raise NotImplementedError("to_torch() knows softmax_type='vanilla' and softcap=0 alone")
        if op.hides.names or op.hides.window is not None:
            raise NotImplementedError("to_torch() knows attn_mask_type='causal' and 'no_mask', without a window, alone")
        self._op = (op,)  # no child: it has no state

    def as_ops(self, convert: Callable[[str, torch.nn.Module], torch.nn.Module]) -> ops.FusableOperation:
        """The op."""
        return self._op[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[S, B, heads * head_dim] of packed [S, B, (heads + 2 kv_heads) * head_dim], in either order of S and B."""
        op: Any = self._op[0]
        sequence_first = op.layout == "sequence_first"
        x = x.transpose(0, 1) if sequence_first else x
        q, k, v = (t.transpose(1, 2) for t in _heads(x, op))
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            dropout_p=op.dropout if self.training else 0.0,
            is_causal=op.hides.causal,
            scale=op.scale,
            enable_gqa=op.kv_heads != op.heads,
        )
        y = y.transpose(1, 2).flatten(2)
        return y.transpose(0, 1) if sequence_first else y


def _heads(x: torch.Tensor, op: Any) -> tuple[torch.Tensor, ...]:
    """Queries, keys and values, [B, S, heads, head_dim] each."""
    heads, groups, dim = op.heads, op.kv_heads, op.head_dim
    if op.packing == "blocked":
        parts = x.split([heads * dim, groups * dim, groups * dim], -1)
        return tuple(part.unflatten(-1, (-1, dim)) for part in parts)
    packed = x.unflatten(-1, (groups, heads // groups + 2, dim))
    q, k, v = packed.split([heads // groups, 1, 1], -2)
    return q.flatten(-3, -2), k.squeeze(-2), v.squeeze(-2)


class TorchBranch(torch.nn.Sequential):
    """x + branch(x)."""

    def as_ops(self, convert: Callable[[str, torch.nn.Module], torch.nn.Module]) -> Residual:
        """The same of ops."""
        return Residual(OrderedDict((name, convert(name, child)) for name, child in self.named_children()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum."""
        return x + super().forward(x)

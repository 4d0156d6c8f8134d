"""What is measured: models of te_fuser's ops, each beside its twin of torch.nn as people write it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

import te_fuser
from te_fuser import ops

HEAD_DIM = 64
POSITIONS = 512  # tokens of one sample in a GPT layer


@dataclass(frozen=True)
class Pair:
    """Two models with the same parameters, and the shapes of what they take.

    Attributes:
        shape: of the main input.
        named: shapes of further inputs, by name.
        exact: whether both compute the same numbers; not so with dropout, which draws.
    """

    eager: nn.Module
    fused: nn.Module
    shape: tuple[int, ...]
    named: dict[str, tuple[int, ...]] = field(default_factory=dict)
    exact: bool = True


# A builder makes the pair for (tokens, hidden, options of te_fuser.Sequential).
Builder = Callable[..., Pair]


def mlp(tokens: int, hidden: int, **options: object) -> Pair:
    """LayerNorm, Linear h -> 4h, GELU, Linear 4h -> h."""
    return _four_ops(tokens, hidden, 4 * hidden, options)


def four_ops(tokens: int, hidden: int, **options: object) -> Pair:
    """LayerNorm, Linear, GELU, Linear, all h -> h: so small that calling costs more than computing."""
    return _four_ops(tokens, hidden, hidden, options)


def _four_ops(tokens: int, hidden: int, inner: int, options: dict[str, object]) -> Pair:
    eager = nn.Sequential(
        nn.LayerNorm(hidden), nn.Linear(hidden, inner), nn.GELU(approximate="tanh"), nn.Linear(inner, hidden)
    )
    fused = te_fuser.Sequential(
        ops.LayerNorm(hidden), ops.Linear(hidden, inner), ops.GELU(), ops.Linear(inner, hidden), **options
    )
    return Pair(eager, fused, (tokens, hidden))


def gpt(dropout: float) -> Builder:
    """A pre-norm layer: causal attention and an MLP, each a branch that ends in dropout beside the residual stream."""

    def build(tokens: int, hidden: int, **options: object) -> Pair:
        positions = min(POSITIONS, tokens)
        heads = max(hidden // HEAD_DIM, 1)
        eager = nn.Sequential(
            OrderedDict(attention=_eager_attention(hidden, heads, dropout), mlp=_eager_mlp(hidden, dropout))
        )
        fused = te_fuser.Sequential(
            OrderedDict(attention=_fused_attention(hidden, heads, dropout), mlp=_fused_mlp(hidden, dropout)), **options
        )
        return Pair(eager, fused, (tokens // positions, positions, hidden), exact=dropout == 0.0)

    return build


class _Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class _CausalAttention(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, positions, features = x.shape
        q, k, v = (
            part.view(batch, positions, self.heads, -1).transpose(1, 2) for part in x.split(features // 3, dim=-1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, positions, features // 3)


def _eager_attention(hidden: int, heads: int, dropout: float) -> nn.Module:
    return _Residual(
        OrderedDict(
            norm=nn.LayerNorm(hidden),
            qkv=nn.Linear(hidden, 3 * hidden),
            attention=_CausalAttention(heads),
            out=nn.Linear(hidden, hidden),
            dropout=nn.Dropout(dropout),
        )
    )


def _eager_mlp(hidden: int, dropout: float) -> nn.Module:
    return _Residual(
        OrderedDict(
            norm=nn.LayerNorm(hidden),
            up=nn.Linear(hidden, 4 * hidden),
            gelu=nn.GELU(approximate="tanh"),
            down=nn.Linear(4 * hidden, hidden),
            dropout=nn.Dropout(dropout),
        )
    )


def _fused_attention(hidden: int, heads: int, dropout: float) -> nn.Module:
    return te_fuser.Residual(
        OrderedDict(
            norm=ops.LayerNorm(hidden),
            qkv=ops.Linear(hidden, 3 * hidden),
            attention=ops.DotProductAttention(
                heads, hidden // heads, mask="causal", layout="batch_first", packing="blocked"
            ),
            out=ops.Linear(hidden, hidden),
            dropout=ops.Dropout(dropout),
        )
    )


def _fused_mlp(hidden: int, dropout: float) -> nn.Module:
    return te_fuser.Residual(
        OrderedDict(
            norm=ops.LayerNorm(hidden),
            up=ops.Linear(hidden, 4 * hidden),
            gelu=ops.GELU(),
            down=ops.Linear(4 * hidden, hidden),
            dropout=ops.Dropout(dropout),
        )
    )


def chain(tokens: int, hidden: int, **options: object) -> Pair:
    """y = skip + dropout(gelu(x + bias)): what stands between two matrix products of a layer."""
    fused = te_fuser.Sequential(ops.Bias(hidden), ops.GELU(), ops.Dropout(0.1), ops.Add("skip"), **options)
    return Pair(_EagerChain(hidden), fused, (tokens, hidden), {"skip": (tokens, hidden)}, exact=False)


class _EagerChain(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return skip + self.dropout(functional.gelu(x + self.bias, approximate="tanh"))


def layer_norm(tokens: int, hidden: int, **options: object) -> Pair:
    """LayerNorm alone."""
    return Pair(nn.LayerNorm(hidden), te_fuser.Sequential(ops.LayerNorm(hidden), **options), (tokens, hidden))


def rms_norm(tokens: int, hidden: int, **options: object) -> Pair:
    """RMSNorm alone."""
    fused = te_fuser.Sequential(ops.RMSNorm(hidden, eps=1e-5), **options)
    return Pair(nn.RMSNorm(hidden, eps=1e-5), fused, (tokens, hidden))


def swiglu(tokens: int, hidden: int, **options: object) -> Pair:
    """y = silu(gate) * linear of an input twice as wide as hidden."""
    return Pair(_EagerSwiGLU(), te_fuser.Sequential(ops.SwiGLU(), **options), (tokens, 2 * hidden))


class _EagerSwiGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, dim=-1)
        return functional.silu(gate) * linear

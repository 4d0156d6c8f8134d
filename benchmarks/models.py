"""Models that are measured: of te_fuser's ops, each beside its twin of torch.nn as people write it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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


@dataclass(frozen=True)
class Rival:
    """A model ready to be called."""

    model: nn.Module
    x: torch.Tensor
    named: dict[str, torch.Tensor]
    dy: torch.Tensor | tuple[torch.Tensor, ...]
    leaves: tuple[torch.Tensor, ...] = field(default=())

    def forward(self) -> Any:
        """The output, without a thought of gradients."""
        with torch.no_grad():
            return self.model(self.x, **self.named)

    def forward_and_backward(self) -> Any:
        """The output; the gradients are new ones each time, as after optimizer.zero_grad()."""
        self.clear()
        y = self.model(self.x, **self.named)
        torch.autograd.backward(y, self.dy)
        return y

    def clear(self) -> None:
        """Drop the gradients."""
        for leaf in self.leaves:
            leaf.grad = None

    def runner(self, direction: str) -> Callable[[], Any]:
        """Function that a direction calls."""
        return {"forward": self.forward, "forward+backward": self.forward_and_backward}[direction]

    def like(self, model: nn.Module) -> Rival:
        """Another model for the same call."""
        return Rival(model, self.x, self.named, self.dy, (self.x, *self.named.values(), *model.parameters()))

    def again(self) -> Rival:
        """Rival with the model and other inputs of equal shapes."""
        x, *named = (torch.randn_like(t).requires_grad_() for t in (self.x, *self.named.values()))
        one = isinstance(self.dy, torch.Tensor)
        dy = torch.randn_like(self.dy) if one else tuple(map(torch.randn_like, self.dy))  # type: ignore[arg-type]
        return Rival(self.model, x, dict(zip(self.named, named, strict=True)), dy).like(self.model)


def rivals(pair: Pair, dtype: torch.dtype, device: torch.device = torch.device("cpu")) -> dict[str, Rival]:  # noqa: B008
    """Both models of a pair, "eager" and "te_fuser", with the same parameters and the same inputs.

    Raises:
        RuntimeError: when they compute the same thing and yet differ.
    """
    copy_parameters(pair.eager, pair.fused)
    for model in (pair.eager, pair.fused):
        model.to(device, dtype)
    x = _input(pair.shape, dtype, device)
    named = {name: _input(shape, dtype, device) for name, shape in pair.named.items()}
    with torch.no_grad():
        y = pair.eager(x, **named)
    dy = torch.randn_like(y) if isinstance(y, torch.Tensor) else tuple(map(torch.randn_like, y))
    empty = Rival(pair.eager, x, named, dy)
    found = {"eager": empty.like(pair.eager), "te_fuser": empty.like(pair.fused)}
    if pair.exact:
        check_alike(found["eager"], found["te_fuser"])
    return found


def copy_parameters(source: nn.Module, target: nn.Module) -> None:
    """Give a model another's parameters, in their order."""
    for ours, theirs in zip(target.parameters(), source.parameters(), strict=True):
        ours.data.copy_(theirs.data)


def _input(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, device=device).requires_grad_()


def check_alike(*found: Rival) -> None:
    """A fast wrong answer is no answer.

    Raises:
        RuntimeError: when the two differ in their output or in the input's gradient.
    """
    results = []
    for rival in found:
        y = rival.forward_and_backward()
        assert rival.x.grad is not None
        results.append((y.detach().float(), rival.x.grad.float()))
    tolerance = 1e-3 if found[0].x.dtype == torch.float32 else 0.05
    for what, theirs, ours in zip(("output", "input gradient"), *results, strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        if not error < tolerance:
            raise RuntimeError(f"the {what} of te_fuser differs from eager's by {error:.1e} of the largest")


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


@dataclass(frozen=True)
class Attention:
    """Causal attention of a layer.

    Attributes:
        head_dim: features of a head; a layer narrower than four heads has smaller ones.
        positions: tokens of one sample; fewer when the layer has fewer tokens.
        sharing: query heads for each key/value head.
        dropout: of the probabilities.
        rotary: whether queries and keys turn by their positions.
    """

    head_dim: int = HEAD_DIM
    positions: int = POSITIONS
    sharing: int = 1
    dropout: float = 0.0
    rotary: bool = False

    def heads(self, hidden: int) -> tuple[int, int, int]:
        """(query heads, key/value heads, features of each)."""
        head_dim = min(self.head_dim, max(hidden // 4, 1))
        heads = max(hidden // head_dim, 1)
        return heads, max(heads // self.sharing, 1), head_dim

    def packed(self, hidden: int) -> int:
        """Features of queries, keys and values together."""
        heads, kv_heads, head_dim = self.heads(hidden)
        return (heads + 2 * kv_heads) * head_dim

    def shape(self, tokens: int, hidden: int) -> tuple[int, int, int]:
        """Of the layer's input."""
        positions = min(self.positions, tokens)
        return tokens // positions, positions, hidden


def gpt(dropout: float, attention: Attention = Attention()) -> Builder:  # noqa: B008 - frozen
    """A pre-norm layer: causal attention and an MLP, each a branch that ends in dropout beside the residual stream."""

    def build(tokens: int, hidden: int, **options: object) -> Pair:
        eager = nn.Sequential(
            OrderedDict(attention=_eager_attention(hidden, attention, dropout), mlp=_eager_mlp(hidden, dropout))
        )
        fused = te_fuser.Sequential(
            OrderedDict(attention=_fused_attention(hidden, attention, dropout), mlp=_fused_mlp(hidden, dropout)),
            **options,
        )
        exact = dropout == 0.0 and attention.dropout == 0.0
        return Pair(eager, fused, attention.shape(tokens, hidden), exact=exact)

    return build


class _Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class CausalAttention(nn.Module):
    """Eager's, on [all queries | all keys | all values]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, hidden: int, attention: Attention) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = attention.heads(hidden)
        self.dropout, self.rotary = attention.dropout, attention.rotary
        if self.rotary:
            speeds = 10000.0 ** (-torch.arange(0, self.head_dim, 2) / self.head_dim)
            angles = (torch.arange(attention.positions)[:, None] * speeds).repeat(1, 2)
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, positions, _ = x.shape
        sizes = [heads * self.head_dim for heads in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (part.view(batch, positions, -1, self.head_dim).transpose(1, 2) for part in x.split(sizes, dim=-1))
        if self.rotary:
            q, k = self._turned(q), self._turned(k)
        y = functional.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout, enable_gqa=self.kv_heads != self.heads
        )
        return y.transpose(1, 2).reshape(batch, positions, self.heads * self.head_dim)

    def _turned(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        length = x.shape[-2]
        return x * self.cos[:length] + torch.cat((-b, a), dim=-1) * self.sin[:length]


def _eager_attention(hidden: int, attention: Attention, dropout: float) -> nn.Module:
    return _Residual(
        OrderedDict(
            norm=nn.LayerNorm(hidden),
            qkv=nn.Linear(hidden, attention.packed(hidden)),
            attention=CausalAttention(hidden, attention),
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


def _attention_ops(hidden: int, attention: Attention) -> list[ops.FusableOperation]:
    heads, kv_heads, head_dim = attention.heads(hidden)
    laid_out = {"layout": "batch_first", "packing": "blocked"}
    turn = ops.RotaryEmbedding(head_dim, heads=heads, kv_heads=kv_heads, **laid_out)
    attend = ops.DotProductAttention(
        heads, head_dim, kv_heads=kv_heads, mask="causal", dropout=attention.dropout, **laid_out
    )
    return [turn, attend] if attention.rotary else [attend]


def _fused_attention(hidden: int, attention: Attention, dropout: float) -> nn.Module:
    return te_fuser.Residual(
        ops.LayerNorm(hidden),
        ops.Linear(hidden, attention.packed(hidden)),
        *_attention_ops(hidden, attention),
        ops.Linear(hidden, hidden),
        ops.Dropout(dropout),
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


def llama(attention: Attention) -> Builder:
    """A layer of Llama (Touvron et al., 2023): RMSNorm, rotary positions, shared key/value heads, SwiGLU, no biases."""

    def build(tokens: int, hidden: int, **options: object) -> Pair:
        packed, inner = attention.packed(hidden), gated_features(hidden)
        eager = nn.Sequential(
            _Residual(
                nn.RMSNorm(hidden, eps=1e-5),
                nn.Linear(hidden, packed, bias=False),
                CausalAttention(hidden, attention),
                nn.Linear(hidden, hidden, bias=False),
            ),
            _Residual(*_eager_gated(hidden, inner)),
        )
        fused = te_fuser.Sequential(
            te_fuser.Residual(
                ops.RMSNorm(hidden, eps=1e-5),
                ops.Linear(hidden, packed, bias=False),
                *_attention_ops(hidden, attention),
                ops.Linear(hidden, hidden, bias=False),
            ),
            te_fuser.Residual(*_fused_gated(hidden, inner)),
            **options,
        )
        return Pair(eager, fused, attention.shape(tokens, hidden), exact=attention.dropout == 0.0)

    return build


def gated_features(hidden: int) -> int:
    """Features between the products of a gated MLP: 3.5 of hidden, as in Llama 3."""
    return 7 * hidden // 2


def gated_mlp(tokens: int, hidden: int, **options: object) -> Pair:
    """RMSNorm, Linear h -> 2 x 3.5h, SwiGLU, Linear 3.5h -> h, no biases."""
    inner = gated_features(hidden)
    fused = te_fuser.Sequential(*_fused_gated(hidden, inner), **options)
    return Pair(nn.Sequential(*_eager_gated(hidden, inner)), fused, (tokens, hidden))


def _eager_gated(hidden: int, inner: int) -> list[nn.Module]:
    up, down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)
    return [nn.RMSNorm(hidden, eps=1e-5), up, _EagerSwiGLU(), down]


def _fused_gated(hidden: int, inner: int) -> list[ops.FusableOperation]:
    up, down = ops.Linear(hidden, 2 * inner, bias=False), ops.Linear(inner, hidden, bias=False)
    return [ops.RMSNorm(hidden, eps=1e-5), up, ops.SwiGLU(), down]


def linear_residual(tokens: int, hidden: int, **options: object) -> Pair:
    """y = skip + Linear 4h -> h (x)."""
    fused = te_fuser.Sequential(ops.Linear(4 * hidden, hidden), ops.Add("skip"), **options)
    return Pair(_EagerLinearResidual(hidden), fused, (tokens, 4 * hidden), {"skip": (tokens, hidden)})


class _EagerLinearResidual(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return skip + self.linear(x)


def linear(tokens: int, hidden: int, **options: object) -> Pair:
    """Linear h -> h alone."""
    return Pair(nn.Linear(hidden, hidden), te_fuser.Sequential(ops.Linear(hidden, hidden), **options), (tokens, hidden))


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


def bias_gelu(tokens: int, hidden: int, **options: object) -> Pair:
    """gelu(x + bias), the tanh form."""
    fused = te_fuser.Sequential(ops.Bias(hidden), ops.GELU(), **options)
    return Pair(_EagerBiasGELU(hidden), fused, (tokens, hidden))


class _EagerBiasGELU(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.gelu(x + self.bias, approximate="tanh")


def bias_dropout_add(tokens: int, hidden: int, **options: object) -> Pair:
    """y = skip + dropout(x + bias)."""
    fused = te_fuser.Sequential(ops.Bias(hidden), ops.Dropout(0.1), ops.Add("skip"), **options)
    return Pair(_EagerBiasDropoutAdd(hidden), fused, (tokens, hidden), {"skip": (tokens, hidden)}, exact=False)


class _EagerBiasDropoutAdd(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(hidden))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> torch.Tensor:
        return skip + self.dropout(x + self.bias)


def bias_dropout_add_norm(tokens: int, hidden: int, **options: object) -> Pair:
    """s = skip + dropout(x + bias), y = layer_norm(s); both are outputs, as in a layer whose residual goes on."""
    fused = te_fuser.Sequential(
        ops.Bias(hidden), ops.Dropout(0.1), ops.Add("skip"), ops.Output("sum"), ops.LayerNorm(hidden), **options
    )
    eager = _EagerBiasDropoutAddNorm(hidden)
    return Pair(eager, _WithSum(fused), (tokens, hidden), {"skip": (tokens, hidden)}, exact=False)


class _EagerBiasDropoutAddNorm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.add = _EagerBiasDropoutAdd(hidden)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.add(x, skip)
        return self.norm(total), total


class _WithSum(nn.Module):
    """A Sequential called for its output "sum" too."""

    def __init__(self, fused: te_fuser.Sequential) -> None:
        super().__init__()
        self.fused = fused

    def forward(self, x: torch.Tensor, skip: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.fused(x, skip=skip, outputs=("sum",))

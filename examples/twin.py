"""GPT in plain torch.nn, for comparison; its state_dict has the same keys and shapes as `gpt.build_gpt`'s."""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from gpt import Shape
from torch import nn
from torch.nn import functional


def build_twin(shape: Shape) -> nn.Sequential:
    """Tokens [batch, position] in, logits [batch, position, vocabulary] out."""
    return nn.Sequential(
        OrderedDict(
            embedding=nn.Embedding(shape.vocabulary, shape.hidden),
            blocks=nn.Sequential(*(_block(shape) for _ in range(shape.layers))),
            norm=_norm(shape),
            head=nn.Linear(shape.hidden, shape.vocabulary, bias=False),
        )
    )


@torch.no_grad()
def nudge(model: nn.Module, generator: torch.Generator) -> None:
    """Move each parameter's numbers by one unit in the last place of its dtype, up or down by chance."""
    for parameter in model.parameters():
        up = torch.rand(parameter.shape, generator=generator) < 0.5
        direction = torch.where(up, math.inf, -math.inf).to(parameter)
        parameter.copy_(torch.nextafter(parameter, direction))


def _block(shape: Shape) -> nn.Sequential:
    attention = _Residual(
        OrderedDict(
            norm=_norm(shape),
            qkv=nn.Linear(shape.hidden, 3 * shape.hidden, bias=False),
            attention=_CausalAttention(shape),
            out=nn.Linear(shape.hidden, shape.hidden, bias=False),
            dropout=nn.Dropout(shape.dropout),
        )
    )
    mlp = _Residual(
        OrderedDict(
            norm=_norm(shape),
            up=nn.Linear(shape.hidden, 2 * shape.inner, bias=False),
            activation=_SwiGLU(),
            down=nn.Linear(shape.inner, shape.hidden, bias=False),
            dropout=nn.Dropout(shape.dropout),
        )
    )
    return nn.Sequential(OrderedDict(attention=attention, mlp=mlp))


def _norm(shape: Shape) -> nn.RMSNorm:
    return nn.RMSNorm(shape.hidden, eps=1e-5)  # te_fuser's default


class _Residual(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


class _SwiGLU(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = x.chunk(2, -1)
        return functional.silu(gate) * linear


class _CausalAttention(nn.Module):
    """Rotary positions and attention on [all queries | all keys | all values]."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.head_dim = shape.heads, shape.head_dim
        speeds = 10000.0 ** (-torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.arange(shape.context)[:, None] * speeds
        # Not in the state_dict: they are constants, and te_fuser's op has none there either.
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = x.view(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = self._turn(q), self._turn(k)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y.transpose(1, 2).reshape(batch, length, -1)

    def _turn(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        turned = x * self.cos[:length] + x.roll(self.head_dim // 2, -1) * self.sin[:length]
        return turned.to(x.dtype)

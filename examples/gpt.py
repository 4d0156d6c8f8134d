"""A small GPT as one list of te_fuser operations.

The parts are those of Llama (Touvron et al., 2023): RMSNorm before each branch, rotary positions, SwiGLU, no biases.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import torch

from te_fuser import Residual, Sequential, ops


@dataclass(frozen=True)
class Shape:
    """Everything that the parameters' names and sizes depend on, and the dropout.

    Raises:
        ValueError: when the numbers make no model.
    """

    layers: int
    hidden: int
    heads: int
    context: int
    dropout: float
    vocabulary: int = 256

    def __post_init__(self) -> None:
        for name in ("layers", "hidden", "heads", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        if self.hidden % self.heads:
            raise ValueError(f"heads must divide hidden: {self.hidden} features cannot be cut into {self.heads} heads")
        if self.head_dim % 2:
            raise ValueError(
                f"hidden / heads must be even, as rotary positions turn features in pairs: "
                f"{self.hidden} / {self.heads} = {self.head_dim}"
            )
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.hidden // self.heads

    @property
    def inner(self) -> int:
        """Features between the MLP's products: 8/3 of hidden, as SwiGLU has three matrices, in steps of 32."""
        return -(-8 * self.hidden // (3 * 32)) * 32


def build_gpt(shape: Shape, kernels: str = "auto") -> Sequential:
    """Tokens [batch, position] in, logits [batch, position, vocabulary] out.

    `kernels` is te_fuser.Sequential's: "auto", "generated" or "reference".
    """
    model = Sequential(
        OrderedDict(
            embedding=torch.nn.Embedding(shape.vocabulary, shape.hidden),
            blocks=Sequential(*(block(shape, kernels) for _ in range(shape.layers))),
            norm=ops.RMSNorm(shape.hidden),
            head=ops.Linear(shape.hidden, shape.vocabulary, bias=False),
        ),
        kernels=kernels,
    )
    init_weights(model, shape)
    return model


def block(shape: Shape, kernels: str = "auto") -> Sequential:
    """Attention, then an MLP, each a branch beside the residual stream."""
    return Sequential(OrderedDict(attention=attention_branch(shape), mlp=mlp_branch(shape)), kernels=kernels)


def attention_branch(shape: Shape) -> Residual:
    """Every position reads from itself and those before it."""
    return Residual(
        OrderedDict(
            norm=ops.RMSNorm(shape.hidden),
            qkv=ops.Linear(shape.hidden, 3 * shape.hidden, bias=False),
            rotary=ops.RotaryEmbedding(shape.head_dim, heads=shape.heads, layout="batch_first", packing="blocked"),
            attention=ops.DotProductAttention(
                shape.heads, shape.head_dim, mask="causal", layout="batch_first", packing="blocked"
            ),
            out=ops.Linear(shape.hidden, shape.hidden, bias=False),
            dropout=ops.Dropout(shape.dropout),
        )
    )


def mlp_branch(shape: Shape) -> Residual:
    """Every position by itself."""
    return Residual(
        OrderedDict(
            norm=ops.RMSNorm(shape.hidden),
            up=ops.Linear(shape.hidden, 2 * shape.inner, bias=False),
            activation=ops.SwiGLU(),
            down=ops.Linear(shape.inner, shape.hidden, bias=False),
            dropout=ops.Dropout(shape.dropout),
        )
    )


def init_weights(model: torch.nn.Module, shape: Shape) -> None:
    """Matrices from N(0, 0.02^2); those that end a branch smaller, so that the sum of all branches starts like one.

    Source: Radford et al., "Language models are unsupervised multitask learners" (2019).
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            ends_branch = name.endswith(("out.weight", "down.weight"))
            torch.nn.init.normal_(parameter, std=0.02 / ((2 * shape.layers) ** 0.5 if ends_branch else 1.0))

"""Settings of the benchmark for each part: device, sizes, and length of measurements."""

from __future__ import annotations

import gc
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import models
from benchmarks.gpu.contest.measure import Card, Effort
from benchmarks.models import Attention, Builder


@dataclass(frozen=True)
class Scale:
    """The sizes of everything.

    Attributes:
        tokens, hidden, positions: of a layer; the attention's heads have 128 features.
        norms: tokens of the norms and of bias + dropout + add alone; the other stretches have `tokens`.
        growing_tokens, growing_hidden: what the part `growth` goes through.
        small_tokens, narrow: of the layers in the part `small`: few tokens, and many of few features.
        decoding_rows: how many samples make a step in the part `decoding`.
        train: arguments of the training example; it takes `train_steps`, and `exact_steps` where no dropout draws.
    """

    tokens: int = 8192
    hidden: int = 4096
    positions: int = 2048
    norms: int = 16384
    growing_tokens: tuple[int, ...] = tuple(1024 << k for k in range(7))
    growing_hidden: tuple[int, ...] = (1024, 2048, 4096, 8192)
    train: tuple[str, ...] = ("--size", "large")
    train_steps: int = 1000
    exact_steps: int = 300
    small_tokens: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    narrow: int = 1024
    decoding_rows: tuple[int, ...] = (1, 8, 64)

    def attention(self, dropout: float = 0.0, **options: Any) -> Attention:
        """A layer's."""
        return Attention(128, self.positions, dropout=dropout, **options)


TOY = Scale(
    32, 64, 16, 64, (16, 32), (32, 64),
    ("--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "64", "--text", "te_fuser/ops"),
    3, 3, (4, 8), 32, (1, 3),
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Device, sizes and length of measurements; `tune`: models may measure their choices first."""

    card: Card
    scale: Scale = field(default_factory=Scale)
    effort: Effort = field(default_factory=Effort)
    with_compile: bool = True
    tune: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the card."""
        return self.card.device

    @property
    def options(self) -> dict[str, Any]:
        """Of te_fuser's models: what falls back to PyTorch's operations is not what is to be measured."""
        return {"fallback": "error"} if self.card.is_gpu else {}

    def build(self, builder: Builder, tokens: int, hidden: int, **options: object) -> models.Pair:
        """A pair, made on the device."""
        with self.device:
            return builder(tokens, hidden, **{**self.options, **options})

    def compiled(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """By torch.compile, forgetting what was compiled before: its limit on recompilation is for one model."""
        torch._dynamo.reset()
        return torch.compile(model, **options)  # type: ignore[return-value]


def forget() -> None:
    """Let go of the memory of what has been measured: the next case is another size."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

"""DotProductAttention by PyTorch's own kernels, one joint fusion for each of them: attention_<provider>."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from te_fuser.fusions.match import Cost, FusionCall, Match
from te_fuser.fusions.registry import Fusion, fusion
from te_fuser.kernels.attention import PROVIDERS, AttentionProblem, Provider
from te_fuser.ops.dot_product_attention import AttentionSettings, DotProductAttention


def _settings(m: FusionCall) -> AttentionSettings:
    """What was planned: the op may have left training since its forward."""
    op = m[0].op
    return replace(op.settings(), dropout=op.dropout if m.draws(0) else 0.0)


def _op(m: Match) -> DotProductAttention:
    return cast(DotProductAttention, m[0].op)


def _declare(provider: Provider) -> Fusion:
    class Body:
        @staticmethod
        def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
            op = m[0].op
            mask = m["0.attention_mask"] if op.named_inputs() else None
            random = m.random(0) if provider.draws and m.draws(0) else None
            y, saved = provider.forward(_settings(m), x, mask, random)
            for name, tensor in saved.items():
                m.emit(name, tensor)
            return y

        @staticmethod
        def backward(m: FusionCall, dy: torch.Tensor) -> torch.Tensor:
            op = m[0].op
            tensors: dict[str, Any] = {name: m[name] for name in ("input", "output", *provider.emits)}
            if op.named_inputs():
                tensors["attention_mask"] = m["0.attention_mask"]
            return provider.backward(_settings(m), tensors, dy)

    def when(m: Match) -> bool | str:
        return provider.reason_not(AttentionProblem.of(_op(m).settings(), m.x, m.capability)) or True

    def cost(m: Match) -> tuple[Cost, Cost]:
        x, y = (spec.rows * spec.features * spec.dtype.itemsize for spec in (m.x, m.y))
        flops = _op(m).flops(m.x, {})
        forward, backward = provider.speed
        # Backward has five products to forward's two: it makes the scores again.
        return Cost(x, y, flops, efficiency=forward), Cost(x + 2 * y, x, 2.5 * flops, efficiency=backward)

    def saved_bytes(m: Match) -> dict[str, int]:
        rows = m.x.rows * _op(m).heads
        wide = 8 if m.dtype == torch.float64 else 4
        return {name: wide * rows if name.endswith("logsumexp") else 8 for name in provider.emits}

    Body.__doc__ = f"{type(provider).__doc__ or ''}".strip()
    return fusion(
        joint=[DotProductAttention],
        name=f"attention_{provider.name}",
        when=when,
        cost=cost,
        reads=("input", "output"),
        saves=provider.emits,
        saved_bytes=saved_bytes,
    )(Body)


FUSIONS = tuple(_declare(p) for p in PROVIDERS)

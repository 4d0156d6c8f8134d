"""Presets beside the bare lists of their ops, and on a CPU what a call of each takes where only the host counts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import te_fuser
from benchmarks.common import Effort, compete
from benchmarks.models import Rival, check_alike
from te_fuser import ops

APART = ("query", "key", "value")
_POSITIONS = 512  # of one sample in a layer
_MOST = 10e-6  # seconds of a preset's call beyond its list's


@dataclass(frozen=True)
class Twins:
    """A preset, and the ops of its list with parameters of their own, for a hidden size and options of lists."""

    name: str
    preset: Callable[..., torch.nn.Module]
    bare: Callable[[int], list[ops.FusableOperation]]
    shape: Callable[[int, int], tuple[int, ...]] = lambda tokens, hidden: (tokens, hidden)

    def build(
        self, tokens: int, hidden: int, dtype: torch.dtype, options: dict[str, Any], names: tuple[str, str]
    ) -> dict[str, Rival]:
        """List and preset, by these names, with the same parameters and the same inputs.

        Raises:
            RuntimeError: when they differ.
        """
        preset = self.preset(hidden, **options).to(dtype)
        bare = te_fuser.Sequential(*self.bare(hidden), **options).to(dtype)
        x = torch.randn(self.shape(tokens, hidden), dtype=dtype).requires_grad_()
        with torch.no_grad():
            for ours, parts in zip(bare.parameters(), _joined(preset), strict=True):
                ours.copy_(torch.cat(parts))
        call = Rival(bare, x, {}, torch.randn_like(bare(x)))
        found = dict(zip(names, (call.like(bare), call.like(preset)), strict=True))
        check_alike(*found.values())
        return found


def _joined(preset: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The parameters, those that are parts of one together."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in preset.named_parameters():
        path, _, own = name.rpartition(".")
        part, _, kind = own.rpartition("_")
        parts.setdefault(f"{path}.{kind if part in APART else own}", []).append(parameter.detach())
    yield from parts.values()


def _mlp(hidden: int, **options: Any) -> torch.nn.Module:
    return te_fuser.LayerNormMLP(hidden, 4 * hidden, **options)


def _projection(hidden: int, **options: Any) -> torch.nn.Module:
    return te_fuser.LayerNormLinear(hidden, 3 * hidden, **options)


def _layer(hidden: int, **options: Any) -> torch.nn.Module:
    dropouts = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    return te_fuser.TransformerLayer(hidden, 4 * hidden, _heads(hidden), **dropouts, **options)


def _heads(hidden: int) -> int:
    return max(hidden // 64, 1)


def _mlp_ops(hidden: int) -> list[ops.FusableOperation]:
    return [ops.LayerNorm(hidden), ops.Linear(hidden, 4 * hidden), ops.GELU(), ops.Linear(4 * hidden, hidden)]


def _projection_ops(hidden: int) -> list[ops.FusableOperation]:
    return [ops.LayerNorm(hidden), ops.Linear(hidden, 3 * hidden)]


def _layer_ops(hidden: int, packing: str) -> list[ops.FusableOperation]:
    heads = _heads(hidden)
    attention = ops.DotProductAttention(heads, hidden // heads, mask="causal", packing=packing, layout="sequence_first")
    return [
        ops.Fork("attention"),
        *_projection_ops(hidden),
        attention,
        ops.Linear(hidden, hidden),
        ops.Add("attention"),
        ops.Fork("mlp"),
        *_mlp_ops(hidden),
        ops.Add("mlp"),
    ]


def _samples(tokens: int, hidden: int) -> tuple[int, int, int]:
    positions = min(tokens, _POSITIONS)
    return positions, tokens // positions, hidden


TWINS = (
    Twins("LayerNormMLP", _mlp, _mlp_ops),
    Twins("LayerNormLinear", _projection, _projection_ops),
    Twins("LayerNormLinear, q, k and v apart", functools.partial(_projection, parameters_split=APART), _projection_ops),
    Twins(
        "TransformerLayer",
        functools.partial(_layer, fuse_qkv_params=True),
        functools.partial(_layer_ops, packing="interleaved"),
        _samples,
    ),
    Twins("TransformerLayer, q, k and v apart", _layer, functools.partial(_layer_ops, packing="blocked"), _samples),
)


@dataclass(frozen=True)
class Sizes:
    """Of the calls that are measured, so small that only the host counts."""

    tokens: int = 16
    hidden: int = 32
    effort: Effort = Effort()


QUICK = Sizes(effort=Effort(rounds=3, turn=0.02))


def measured(sizes: Sizes, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry for each preset and direction: us of a call, of the list and of the preset, in turns."""
    for twins in TWINS:
        torch.manual_seed(0)
        found = twins.build(sizes.tokens, sizes.hidden, torch.float32, options, ("list", "preset"))
        for direction in ("forward", "forward+backward"):
            outcome = compete({name: rival.runner(direction) for name, rival in found.items()}, sizes.effort)
            seconds = {name: timing.seconds for name, timing in outcome.timings.items()}
            goal = 1.0 + _MOST / seconds["list"]
            yield {
                "case": f"{twins.name}, {direction}",
                "family": "presets",
                "measured": {f"{name} us": 1e6 * s for name, s in seconds.items()},
                "ratio": outcome.ratio,
                "goal": goal,
                "met": outcome.ratio <= goal,
            }

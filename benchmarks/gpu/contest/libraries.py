"""Rivals other than PyTorch itself: those that are installed here, and what was measured of them earlier.

Transformer Engine, Liger and quack are not dependencies. Where one is missing, the ratio it reached in an earlier run,
over the floor (or eager) of that same run, stands for it.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

EARLIER_SOURCE = (
    "measured earlier on one H200 (2026-11-20; torch 2.11, cuDNN 9.19; Transformer Engine 2.20.2, Liger 0.8.5, "
    "quack 0.6.5), over the floor or eager of that run"
)
TE, TE_OPS, LIGER, QUACK = "Transformer Engine", "te.ops", "Liger", "quack"
QUACK_TUNED = f"{QUACK} tuned"

# Case -> milliseconds of forward and backward in the earlier run. Its own "floor", or "eager" where the floor was not
# measured, is the yardstick.
EARLIER_MS: dict[str, dict[str, float]] = {
    "seed layer bf16 dropout 0.1": {"floor": 15.95, TE: 17.90},
    "seed layer bf16 dropout 0": {"floor": 15.60, TE: 17.14},
    "seed layer fp16 dropout 0.1": {"eager": 18.56, TE: 18.62},
    "LayerNorm-GELU MLP bf16": {"eager": 10.26, TE: 10.01, TE_OPS: 10.19, LIGER: 10.27},
    "RMSNorm-SwiGLU MLP bf16": {"eager": 14.05, TE: 13.19, TE_OPS: 13.00, LIGER: 13.10},
    "Linear + bias + residual bf16": {"eager": 4.66, TE: 4.75, TE_OPS: 4.65},
}
# Case -> GB/s of forward and backward in the earlier run, where a copy reached this:
EARLIER_COPY = 4247.0
EARLIER_GBPS: dict[str, dict[str, float]] = {
    "LayerNorm": {TE: 3085, LIGER: 2476},
    "RMSNorm": {TE: 3808, LIGER: 2330, QUACK: 3641},
    "bias + GELU": {TE: 2575},
    "SwiGLU": {TE: 4302, LIGER: 4216},
    "bias + dropout + add": {TE: 1610},
}


def earlier_over_floor(case: str, eager_over_floor: float) -> dict[str, float]:
    """Rival -> the time over the floor that it would have here, by the earlier run's ratios."""
    copies = {name: EARLIER_COPY / speed for name, speed in EARLIER_GBPS.get(case, {}).items()}
    times = dict(EARLIER_MS.get(case, {}))
    floor = times.pop("floor", None)
    eager = times.pop("eager", None)
    unit = floor if floor is not None else (eager or 1.0) / eager_over_floor
    return {**copies, **{name: ms / unit for name, ms in times.items()}}


# ------------------------------------------------------------------------------------------ what is installed

# Makes a module that is called like the eager one.
Maker = Callable[[], nn.Module]


def installed(case: str, hidden: int, dropout: float, tuned: bool = False) -> dict[str, Maker]:
    """Rival -> what imports its package and makes its module for a case, for each package that is there.

    One that is not for this machine may raise anything when it is imported.

    Args:
        tuned: whether those that measure their kernels first, for minutes, take part too.
    """
    return {
        name: functools.partial(_made, package, maker, hidden, dropout)
        for name, (package, maker) in _MAKERS.get(case, {}).items()
        if _is_there(package) and (tuned or name != QUACK_TUNED)
    }


def fp8_region() -> contextlib.AbstractContextManager[None]:
    """Transformer Engine's, by delayed scaling as our layers are measured by: HYBRID, the largest of 16 amaxes."""
    recipe = importlib.import_module("transformer_engine.common.recipe").DelayedScaling(
        amax_history_len=16, amax_compute_algo="max"
    )
    region = importlib.import_module(_TE_PACKAGE).fp8_autocast
    return region(enabled=True, fp8_recipe=recipe)  # type: ignore[no-any-return]


def _is_there(package: str) -> bool:
    """True if the package is installed, found without running any of it."""
    return importlib.util.find_spec(package.partition(".")[0]) is not None


def _made(package: str, maker: Callable[[Any, int, float], nn.Module], hidden: int, dropout: float) -> nn.Module:
    return maker(importlib.import_module(package), hidden, dropout)


def versions() -> dict[str, str]:
    """Of those packages that are installed, and of what te_fuser uses where it is."""
    from importlib import metadata

    found = {}
    ours = ("triton", "nvidia-cudnn-frontend", "flash-attn-4", "nvidia-cutlass-dsl")
    for package in ("transformer_engine", "liger_kernel", "quack-kernels", "transformers", *ours):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _te_layer(library: Any, hidden: int, dropout: float) -> nn.Module:
    heads = max(hidden // 128, 1)
    return library.TransformerLayer(
        hidden,
        4 * hidden,
        heads,
        hidden_dropout=dropout,
        attention_dropout=dropout,
        self_attn_mask_type="causal",
        attn_input_format="bshd",
    )


def _te_mlp(library: Any, hidden: int, dropout: float) -> nn.Module:
    return library.LayerNormMLP(hidden, 4 * hidden)


def _te_gated(library: Any, hidden: int, dropout: float) -> nn.Module:
    return library.LayerNormMLP(hidden, 7 * hidden // 2, bias=False, normalization="RMSNorm", activation="swiglu")


class _LigerGated(nn.Module):
    """Liger's norm and gate between plain products."""

    def __init__(self, library: Any, hidden: int) -> None:
        super().__init__()
        inner = 7 * hidden // 2
        self.norm = library.LigerRMSNorm(hidden, eps=1e-5)
        self.up, self.down = nn.Linear(hidden, 2 * inner, bias=False), nn.Linear(inner, hidden, bias=False)
        self.gate = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, linear = self.up(self.norm(x)).chunk(2, dim=-1)
        return self.down(self.gate.apply(gate, linear))


def _liger_mlp(library: Any, hidden: int, dropout: float) -> nn.Module:
    """Its norm; it has nothing for the rest."""
    inner = 4 * hidden
    products = nn.Linear(hidden, inner), nn.Linear(inner, hidden)
    return nn.Sequential(library.LigerLayerNorm(hidden), products[0], nn.GELU(approximate="tanh"), products[1])


class _QuackMLP(nn.Module):
    """A norm, and quack's products with biases, GELU and its slope in their epilogues.

    By the function below its module, which takes biases so in inference only.
    """

    def __init__(self, library: Any, hidden: int, tuned: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.products, self.tuned = library.mlp_func, tuned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.up, self.down
        options = {"activation": "gelu_tanh_approx", "bias1": up.bias, "bias2": down.bias, "tuned": self.tuned}
        return self.products(self.norm(x), up.weight, down.weight, **options)


def _quack_mlp(library: Any, hidden: int, dropout: float, tuned: bool = False) -> nn.Module:
    return _QuackMLP(library, hidden, tuned)


def _quack_gated(library: Any, hidden: int, dropout: float, tuned: bool = False) -> nn.Module:
    norm = importlib.import_module("quack.rmsnorm").QuackRMSNorm(hidden, eps=1e-5)
    return nn.Sequential(norm, library.MLP(hidden, 7 * hidden // 2, activation="swiglu", tuned=tuned))


_TE_PACKAGE, _LIGER_PACKAGE, _QUACK_MLP = "transformer_engine.pytorch", "liger_kernel.transformers", "quack.mlp"
_MAKERS: Mapping[str, Mapping[str, tuple[str, Callable[[Any, int, float], nn.Module]]]] = {
    "seed layer": {TE: (_TE_PACKAGE, _te_layer)},
    "LayerNorm-GELU MLP": {
        TE: (_TE_PACKAGE, _te_mlp),
        LIGER: (_LIGER_PACKAGE, _liger_mlp),
        QUACK: (_QUACK_MLP, _quack_mlp),
        QUACK_TUNED: (_QUACK_MLP, functools.partial(_quack_mlp, tuned=True)),
    },
    "RMSNorm-SwiGLU MLP": {
        TE: (_TE_PACKAGE, _te_gated),
        LIGER: (_LIGER_PACKAGE, lambda library, hidden, dropout: _LigerGated(library, hidden)),
        QUACK: (_QUACK_MLP, _quack_gated),
        QUACK_TUNED: (_QUACK_MLP, functools.partial(_quack_gated, tuned=True)),
    },
    "LayerNorm": {
        TE: (_TE_PACKAGE, lambda library, hidden, dropout: library.LayerNorm(hidden)),
        LIGER: (_LIGER_PACKAGE, lambda library, hidden, dropout: library.LigerLayerNorm(hidden)),
    },
    "RMSNorm": {
        TE: (_TE_PACKAGE, lambda library, hidden, dropout: library.RMSNorm(hidden)),
        LIGER: (_LIGER_PACKAGE, lambda library, hidden, dropout: library.LigerRMSNorm(hidden)),
        QUACK: ("quack.rmsnorm", lambda library, hidden, dropout: library.QuackRMSNorm(hidden)),
    },
}

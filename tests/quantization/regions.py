"""Models and calls in regions of FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Recipe
from tests.float8 import models

F, FFN, HEADS = 32, 64, 2
RECIPE = DelayedScaling(amax_history_len=3)
OTHER = DelayedScaling(amax_history_len=5, margin=1)


MODELS: dict[str, Callable[[], Any]] = {
    **models(F, FFN),
    "odd": lambda: te.Sequential(ops.Linear(F, 24), ops.GELU(), ops.Linear(24, F), ops.GELU(), ops.Linear(F, F)),
    "te.Linear": lambda: te.Linear(F, FFN),
    "te.LayerNormLinear": lambda: te.LayerNormLinear(F, FFN),
    "te.LayerNormMLP": lambda: te.LayerNormMLP(F, FFN),
    "te.LayerNormMLP gated": lambda: te.LayerNormMLP(F, FFN, normalization="RMSNorm", activation="swiglu"),
    "te.MultiheadAttention": lambda: te.MultiheadAttention(F, HEADS, attention_dropout=0.0, attn_mask_type="causal"),
    "te.TransformerLayer": lambda: te.TransformerLayer(F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
    "te.TransformerLayer fused": lambda: te.TransformerLayer(
        F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, fuse_qkv_params=True, num_gqa_groups=1
    ),
}


def data(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*(shape or (5, 3, F)), generator=rng) * scale


def gradients(model: torch.nn.Module, x: torch.Tensor) -> dict[str, torch.Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**found, "x": x.grad} if x.grad is not None else found


def on(recipe: DelayedScaling = RECIPE, **how: Any) -> Any:
    return te.fp8_autocast(**{"enabled": True, "fp8_recipe": recipe, **how})


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return MODELS["mlp"]()


def trained(model: Any, steps: int = 2) -> Any:
    """The model with scales that moved."""
    for step in range(steps):
        with on():
            y = model(data(step, scale=3.0))
        y.square().sum().backward()
    model.zero_grad()
    with on():
        pass  # the last step's amaxes fold
    return model


def amaxes(model: Any) -> dict[str, list[float]]:
    return {name: history.tolist() for name, (_, history) in states(model).items()}


class Reference(torch.nn.Module):
    """A model's reference as the forward of a module."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.reference(x)  # type: ignore[no-any-return]


Found = tuple[torch.Tensor, dict[str, torch.Tensor]]


def call(model: Any, recipe: Recipe | None, x: torch.Tensor, run: Any = None) -> Found:
    """What a call in a region gives, and all gradients of its squares."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        y = (run or model)(x)
    y.float().square().sum().backward()
    return y.detach(), {name: g.clone() for name, g in gradients(model, x).items()}


def assert_same(one: Found, other: Found) -> None:
    """Bit for bit."""
    assert torch.equal(one[0], other[0]) and one[1].keys() == other[1].keys()
    for name, gradient in one[1].items():
        assert torch.equal(gradient, other[1][name]), name

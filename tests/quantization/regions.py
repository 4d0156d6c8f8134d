"""Models and calls in regions of FP8."""

from __future__ import annotations

from typing import Any

import torch

import te_fuser as te
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling
from tests.quantization.test_lowering import MODELS, RECIPE, data, gradients

OTHER = DelayedScaling(amax_history_len=5, margin=1)


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


def call(model: Any, x: torch.Tensor, recipe: Any = RECIPE) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a call in a region gives, and all gradients of its squares."""
    model.zero_grad()
    x = x.detach().clone().requires_grad_()
    with on(recipe):
        y = model(x)
    y.square().sum().backward()
    return y.detach(), {name: g.clone() for name, g in gradients(model, x).items()}

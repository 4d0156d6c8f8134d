"""Helpers for tests of folding: a product that has a state, its records, a step."""

from __future__ import annotations

from typing import Any

import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.params.binding import Binding
from te_fuser.quantization import state, states
from te_fuser.quantization.scale_update import update
from te_fuser.quantization.state import ROLES, State
from te_fuser.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=3)


def state_of(op: Any) -> State:
    """The state of a product."""
    return state.state_of(Binding(op, "weight"))


def ensure(op: Any, recipe: DelayedScaling, device: torch.device | None = None) -> State:
    """State of a product with its tensors, of a call by that recipe."""
    return state.ensure(Binding(op, "weight"), recipe, op.weight.device if device is None else device)


def product(recipe: DelayedScaling = RECIPE) -> ops.MatMul:
    made = ops.MatMul(16, 32, device="cpu")
    with te.autocast(recipe=recipe):
        ensure(made, recipe)
    return made


def recorded(op: ops.MatMul, *amaxes: float) -> State:
    """The state after a call that saw these, by role."""
    for role, amax in zip(ROLES, amaxes, strict=False):
        state_of(op).numbers[f"{role}_amax"].fill_(amax)
    update()
    return state_of(op)


def mean_of(history: torch.Tensor) -> torch.Tensor:
    return history.sum(0) / (history > 0).sum(0).clamp(min=1)


def step(model: Any, x: torch.Tensor, recipe: DelayedScaling = RECIPE, **how: Any) -> None:
    with te.autocast(recipe=recipe, **how):
        y = model(x)
    if y.requires_grad:
        y.square().sum().backward()


def same(one: Any, other: Any) -> bool:
    """Equality of the states of two models."""
    a, b = states(one), states(other)
    return a.keys() == b.keys() and all(torch.equal(x, y) for n in a for x, y in zip(a[n], b[n], strict=True))

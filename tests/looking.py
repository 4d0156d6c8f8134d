"""Helpers for tests of looking at a model: its state before and after, its plans as text, and those that ran."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from te_fuser.fuser import pipeline
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.explain import Explanation
from tests.plans.text import plan_lines


def x_of(*shape: int, grad: bool = True, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(len(shape))).requires_grad_(grad)


def text_of(plans: list[Plan]) -> str:
    """Everything of plans but why they are planned by themselves."""
    plans = [replace(plan, notes=()) for plan in plans]
    return "\n".join([str(Explanation(plans)), *(line for plan in plans for line in plan_lines(plan))])


def plans_that_run(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """A list that grows by each plan that runs."""
    found: list[Plan] = []
    execute = pipeline.execute

    def watched(prepared: Any, *call: Any) -> Any:
        found.append(prepared.plan)
        return execute(prepared, *call)

    monkeypatch.setattr(pipeline, "execute", watched)
    return found


def state_of(model: nn.Module) -> dict[str, Any]:
    """State that a look must leave as it is."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {
        "tensors": {name: (id(t), t._version, t.detach().clone()) for name, t in tensors.items()},
        "gradients": {name: None if t.grad is None else t.grad.clone() for name, t in tensors.items()},
        "modes": [m.training for m in model.modules()],
        "generator": torch.get_rng_state(),
        "python": random.getstate(),
    }


def assert_unchanged(model: nn.Module, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert after["modes"] == before["modes"]
    assert torch.equal(after["generator"], before["generator"]) and after["python"] == before["python"]
    assert after["tensors"].keys() == before["tensors"].keys()
    for name, (number, version, t) in before["tensors"].items():
        assert after["tensors"][name][:2] == (number, version), name
        assert torch.equal(after["tensors"][name][2], t), name
    torch.testing.assert_close(after["gradients"], before["gradients"], rtol=0, atol=0)


class Apply(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def hooked(m: Any) -> Any:
    """The module with a hook that changes nothing."""
    m.register_forward_hook(lambda *_: None)
    return m

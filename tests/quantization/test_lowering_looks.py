"""Looking at models in regions of FP8 changes nothing of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling
from tests.quantization.test_lowering import FFN, F, data

RECIPE = DelayedScaling(amax_history_len=4)


def _trained(y: torch.Tensor) -> None:
    if y.requires_grad:
        y.sum().backward()


LOOKS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "plans": lambda model, x: model.plans(x),
    "explain": lambda model, x: model.explain(x),
    "measure": lambda model, x: model.explain(x, measure=True),
    "h200": lambda model, x: model.plans(x, device="h200"),
    "verify": lambda model, x: te.verify(model, x),
    "reference": lambda model, x: _trained(model.reference(x.requires_grad_())),
    "no_grad": lambda model, x: torch.no_grad()(model)(x),
    "inference_mode": lambda model, x: torch.inference_mode()(model)(x),
    "export": lambda model, x: torch.export.export(Reference(model), (x,)),
}


class Reference(torch.nn.Module):
    """What exporters take."""

    def __init__(self, model: te.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model.reference(x)  # type: ignore[no-any-return]


def model_of(seed: int) -> te.Sequential:
    torch.manual_seed(seed)
    return te.Sequential(ops.LayerNorm(F), ops.Linear(F, F), te.LayerNormMLP(F, FFN))


@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("look", LOOKS)
def test_looks_leave_no_buffers(look: str, first: bool | None) -> None:
    """And the first call behind is as without them."""
    model, x = model_of(0), data(0)
    twin = copy.deepcopy(model)
    with te.autocast(recipe=RECIPE), microbatch(first):
        LOOKS[look](model, x)
    assert not dict(model.named_buffers()) and states(model) == {} and not any("fp8" in n for n in model.state_dict())
    for p in model.parameters():
        p.grad = None
    for m in (model, twin):
        for k in range(2):
            with te.autocast(recipe=RECIPE), microbatch(first):
                y = m(data(k))
            y.square().sum().backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, twin.get_parameter(name).grad)  # type: ignore[arg-type]
    for name, (scale, history) in states(twin).items():
        assert torch.equal(states(model)[name][0], scale) and torch.equal(states(model)[name][1], history)


@pytest.mark.parametrize("look", LOOKS)
def test_looks_by_another_recipe_leave_history_and_recipe(look: str) -> None:
    model, x = model_of(0), data(0)
    with te.autocast(recipe=RECIPE):
        model(x).sum().backward()
    before = {name: (s.clone(), h.clone()) for name, (s, h) in states(model).items()}
    with te.autocast(recipe=DelayedScaling(amax_history_len=7, margin=3)), torch.no_grad():
        LOOKS[look](model, x)
    after = states(model)
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))


def test_weights_of_calls_have_no_state_of_the_model() -> None:
    model, x, w = te.Linear(F, FFN), data(0), torch.randn(FFN, F)
    with te.autocast(recipe=RECIPE):
        model(x, weight=w).sum().backward()
        said = " ".join(str(model.explain(x, weight=w)).split())
    assert "weights come with the call, so their scales are among no states() and in no state_dict" in said
    assert states(model) == {}

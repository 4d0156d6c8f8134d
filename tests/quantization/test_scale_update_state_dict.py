"""The states of a model, by path."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import not_finite, states
from te_fuser.quantization.state import ROLES
from te_fuser.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=3)


def test_paths_of_lists_and_presets() -> None:
    model = torch.nn.ModuleDict(
        {
            "first": te.Sequential(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)),
            "mlp": te.LayerNormMLP(16, 32),
            "head": te.Linear(16, 48),
            "odd": te.Sequential(ops.Linear(16, 10)),  # which no product of 8 bits takes
            "idle": te.Linear(16, 16),
        }
    )
    x = torch.randn(4, 16)
    with te.autocast(recipe=RECIPE):
        sum(model[name](x).sum() for name in ("first", "mlp", "head", "odd")).backward()
    paths = ("first.1", "first.3", "mlp.fc1", "mlp.fc2", "head")
    found = states(model)
    assert [*found] == [f"{path}.{role}" for path in paths for role in ROLES]
    for scale, history in found.values():
        assert scale.shape == () and history.shape == (3,) and scale.dtype == history.dtype == torch.float32
        assert float(history[0]) > 0 == float(history[1])
    assert torch.equal(found["head.weight"].amax_history[0], model["head"].weight.abs().max())
    assert torch.equal(found["mlp.fc2.weight"].scale, torch.tensor(448.0) / model["mlp"].fc2_weight.abs().max())


def test_a_transformer_layer() -> None:
    layer, x = te.TransformerLayer(32, 64, 2), torch.randn(3, 2, 32)
    with te.autocast(recipe=RECIPE):
        layer(x).sum().backward()
    paths = {name.rpartition(".")[0] for name in states(layer)}
    assert len(paths) == 4 and {"layernorm_mlp.fc1", "layernorm_mlp.fc2"} < paths


@torch.no_grad()
def finite(model: torch.nn.Module) -> bool:
    return all(bool(p.grad.isfinite().all()) for p in model.parameters())  # type: ignore[union-attr]


def test_an_overflow_that_gradients_do_not_show_is_counted() -> None:
    """Infinities saturate; each fold that finds one counts, and what was counted once is not again."""
    model, x = te.Sequential(ops.Linear(16, 32, bias=False), ops.GELU(), ops.MatMul(32, 16)), torch.randn(4, 16)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        model.zero_grad()
        with te.autocast(recipe=RECIPE):
            y = model(x)
        y.backward(torch.full_like(y, factor))
        assert finite(model)
        counts.append(not_finite(model))
    assert counts == [{}, {"2.output_gradient": 1}, {"2.output_gradient": 1}]


@pytest.mark.parametrize("look", [states, copy.deepcopy, pickle.dumps, torch.nn.Module.state_dict])
def test_who_looks_inside_of_a_region_changes_nothing(look: Callable[[Any], Any]) -> None:
    def run(look: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = te.Linear(16, 32), torch.randn(4, 16)
        with te.autocast(recipe=RECIPE):
            model(x).sum().backward()
            look(model)
            y = model(3.0 * x)
            hook = y.register_hook(lambda _: look(model) and None)
            y.square().sum().backward()
            hook.remove()
        assert model.weight.grad is not None
        return [y, model.weight.grad, *(t for both in states(model).values() for t in both)]

    for found, want in zip(run(look), run(lambda model: None), strict=True):
        assert torch.equal(found, want)


def test_states_inside_of_a_region_are_those_of_its_entry() -> None:
    model, x = te.Linear(16, 32), torch.randn(4, 16)
    for factor in (1.0, 2.0):
        with te.autocast(recipe=RECIPE):
            model(factor * x)
            scale, history = states(model)["input"]
    assert float(history[0]) == float(x.abs().max()) and torch.equal(scale, torch.tensor(448.0) / history[0])
    assert float(states(model)["input"][1][0]) == 2.0 * float(x.abs().max())


def test_a_product_by_itself_has_no_path() -> None:
    """As its parameters have none."""
    model = te.Linear(16, 32)
    with te.autocast(recipe=RECIPE):
        y = model(torch.randn(4, 16))
    y.backward(torch.full_like(y, float("inf")))
    assert [*states(model)] == [*ROLES] and not_finite(model) == {"output_gradient": 1}


@pytest.mark.parametrize("given", [3, None, torch.ones(2), [te.Linear(16, 32)]])
@pytest.mark.parametrize("function", [states, not_finite])
def test_models_are_modules(function: Callable[[Any], Any], given: Any) -> None:
    words = rf"quantization\.{function.__name__} takes the model .*, got {type(given).__name__}: give"
    with pytest.raises(TypeError, match=words):
        function(given)


def test_counts_are_asked_outside_of_regions() -> None:
    model = te.Linear(16, 32)
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="ask outside, and before the step"):
        not_finite(model)

"""Checkpoints that come between calls: what these recorded before goes with the scales that it belongs to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=3)
BOTH = "fp8_scale", "fp8_amax_history"
Numbers = dict[str, tuple[torch.Tensor, torch.Tensor]]


def forward(model: Any, factor: float = 1.0, recipe: DelayedScaling = RECIPE) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        return model(factor * torch.linspace(-1.0, 1.0, 8 * 16).view(8, 16))  # type: ignore[no-any-return]


def step(model: Any, factor: float = 1.0, recipe: DelayedScaling = RECIPE) -> None:
    forward(model, factor, recipe).square().sum().backward()


def trained(model: Any) -> Any:
    for _ in range(2):
        step(model)
    return model


def assert_same(found: Numbers, wanted: Numbers) -> None:
    assert found.keys() == wanted.keys()
    for name, both in wanted.items():
        for one, other in zip(found[name], both, strict=True):
            assert torch.equal(one, other), name


MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)),
    "preset": lambda: te.LayerNormMLP(16, 32),
    "joined": lambda: te.Linear(16, 48, parameters_split=("q_", "k_", "v_")),
    "torch.nn": lambda: te.from_torch(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_amaxes_of_before_are_not_of_what_was_loaded(name: str, looked: bool, assign: bool) -> None:
    saved = trained(MODELS[name]())
    wanted, checkpoint = states(saved), copy.deepcopy(saved.state_dict())
    model = MODELS[name]()
    step(model, 100.0)
    if looked:
        states(model)
        step(model, 50.0)
    model.load_state_dict(checkpoint, assign=assign)
    assert_same(states(model), wanted)
    step(model)
    step(saved)
    assert_same(states(model), states(saved))


def test_what_comes_behind_a_load_counts() -> None:
    """A backward of a forward from before it, too: what that recorded is gone, and its gradient goes in."""
    saved = trained(te.Linear(16, 32))
    checkpoint = copy.deepcopy(saved.state_dict())
    wanted, model = states(saved), te.Linear(16, 32)
    with te.autocast(recipe=RECIPE):
        y = forward(model, 100.0)
        model.load_state_dict(checkpoint)
    y.backward(torch.full_like(y, 3.0))
    found = states(model)
    for name in ("input", "weight"):
        assert_same({name: found[name]}, {name: wanted[name]})
    scale, history = found["output_gradient"]
    assert history.tolist() == [3.0, *wanted["output_gradient"][1][:2].tolist()]
    assert torch.equal(scale, torch.tensor(57344.0) / history.max())


def test_others_keep_what_they_recorded() -> None:
    """Of a model that loads a part of its products, and where a checkpoint has no scales."""
    model, twin = (te.Sequential(ops.Linear(16, 32), ops.MatMul(32, 16)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        step(m, 100.0)
    wanted = states(twin)
    plain = {key: t for key, t in model.state_dict().items() if not key.endswith(BOTH)}
    model.load_state_dict(plain, strict=False)
    assert_same(states(model), wanted)
    step(model, 200.0)
    step(twin, 200.0)
    before = {key: t.clone() for key, t in trained(MODELS["list"]()).state_dict().items() if key.startswith("0.")}
    model.load_state_dict(before, strict=False)
    found, wanted = states(model), states(twin)
    assert torch.equal(model[0].fp8_amax_history, before["0.fp8_amax_history"])
    others = [name for name in wanted if name.startswith("1.")]
    assert_same({name: found[name] for name in others}, {name: wanted[name] for name in others})


def test_looks_go_on_with_the_scales_that_were_loaded() -> None:
    """A function of one's own gets them as those of before, where it is asked again in the same region."""
    got: list[float] = []

    def made(amax: torch.Tensor, scale: torch.Tensor, most: torch.Tensor, recipe: Any) -> torch.Tensor:
        got.append(float(scale[2]))
        return most / amax

    recipe = DelayedScaling(amax_history_len=3, scaling_factor_compute_algo=made)
    model = te.Linear(16, 32)
    step(model, recipe=recipe)
    states(model)
    loaded = {**model.state_dict(), "fp8_scale": torch.tensor([1.0, 2.0, 4.0])}
    y, z = forward(model, recipe=recipe), forward(model, recipe=recipe)
    states(model)
    model.load_state_dict(loaded)
    y.sum().backward()
    states(model)
    z.sum().backward()
    got.clear()
    states(model)
    assert got == [4.0]

"""Regions of FP8 on models that ranks share: they err as the whole model in FP8 does, and have its scales."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_fuser as te
from te_fuser.fuser.plan.device import capturing
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.gpu.ranks.models import batch, by_nccl, gradients, mesh, own
from tests.gpu.ranks.test_presets import GATED, NO_DROPOUT, make
from tests.parallel.ranks import on_ranks
from tests.parallel.test_float8 import sent

pytestmark = pytest.mark.usefixtures("narrow_products")
RECIPES: dict[str, Any] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
}
STEPS = 3


def model(preset: str) -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(make(preset, **(NO_DROPOUT if preset == "TransformerLayer" else GATED)))


def cut(preset: str, sequence_parallel: bool = True) -> te.Sequential:
    return te.parallelize(model(preset), mesh(), sequence_parallel)


def step(m: Any, call: Any, seed: int, recipe: Any, mine: bool) -> dict[str, torch.Tensor]:
    """Values and gradients of one step in a region; without a recipe in float64."""
    x, dy = batch(seed), batch(seed + 50)
    x, dy = (own(t).contiguous() for t in (x, dy)) if mine else (x, dy)
    x, dy = (x, dy) if recipe else (x.double(), dy.double())
    x = x.detach().clone().requires_grad_()
    m.zero_grad()
    with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=dist.group.WORLD):
        y = call(x)
    y.backward(dy)
    assert x.grad is not None
    return {"y": y.detach().clone(), "x": x.grad, **{name: g.clone() for name, g in gradients(m)}}


def names(m: te.Sequential, recipe: Any) -> list[str]:
    """Of the steps of a plan in a region; those that gather beside a product send by copy engines."""
    with te.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
        plan = m.plan(own(batch()).contiguous().requires_grad_())
    return [step.name for step in (*plan.forward, *plan.backward)]


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("preset", ["LayerNormMLP", "TransformerLayer"])
@pytest.mark.parametrize("by", RECIPES)
@on_ranks
def test_errors_are_those_of_the_whole_model(by: str, preset: str, sequence_parallel: bool) -> None:
    """Held against float64, after steps by which scales have settled."""
    recipe, whole_one, shared = RECIPES[by], model(preset), cut(preset, sequence_parallel)
    exact = copy.deepcopy(whole_one).double()
    with sent() as dtypes:
        for seed in range(STEPS):
            found = step(shared, shared, seed, recipe, sequence_parallel)
    if by == "delayed" and sequence_parallel:
        assert torch.uint8 in dtypes or any(name.startswith("gather_float8") for name in names(shared, recipe))
    for seed in range(STEPS):
        known = step(whole_one, whole_one, seed, recipe, False)
    for name, wanted in step(exact, exact.reference, STEPS - 1, None, False).items():
        usual = (known[name].double() - wanted).norm().item()
        error = found[name].double() - (own(wanted) if sequence_parallel and name in "xy" else wanted)
        assert error.norm().item() <= 1.1 * usual + 0.01 * wanted.norm().item(), (name, error.norm(), usual)
        if not name.endswith("key_bias"):  # whose gradient is 0
            assert usual < 0.25 * wanted.norm().item(), (name, usual)
    if by == "delayed":
        assert_near_states(shared, whole_one)


@pytest.mark.parametrize("by", RECIPES)
@on_ranks
def test_steps_do_not_wait_for_the_gpu(by: str) -> None:
    """From the fifth on: nothing is copied to it that lies in pages which may move, nor read from it at once."""
    if not by_nccl():
        return
    m, x = cut("LayerNormMLP"), own(batch()).contiguous().requires_grad_()
    for number in range(8):
        torch.cuda.set_sync_debug_mode("error" if number >= 4 else "default")
        try:
            with te.autocast(recipe=RECIPES[by], amax_reduction_group=dist.group.WORLD):
                y = m(x)
            y.backward(y.detach())
        finally:
            torch.cuda.set_sync_debug_mode("default")


def assert_near_states(m: Any, twin: Any) -> None:
    """Largest magnitudes may be rounded apart by an ulp."""
    found, wanted = states(m), states(twin)
    assert found.keys() == wanted.keys()
    for name, pair in found.items():
        for a, b in zip(pair, wanted[name], strict=True):
            torch.testing.assert_close(a, b, rtol=0.05, atol=0.0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("by", RECIPES)
@on_ranks
def test_replays_are_calls(by: str) -> None:
    """Replays of a graph captured in a region are calls: they record, and ranks agree on it where one is entered."""
    if not by_nccl():
        return
    recipe = RECIPES[by]
    m = cut("LayerNormMLP")
    twin = copy.deepcopy(m)
    sample = own(batch(0)).contiguous().requires_grad_()
    with te.autocast(recipe=recipe, amax_reduction_group=dist.group.WORLD):
        replayed = te.cuda_graph(m, sample)
    for seed in range(STEPS):
        token = capturing.set(True)  # by the plan that captures have
        wanted = step(twin, twin, seed, recipe, True)
        capturing.reset(token)
        for name, t in step(m, replayed, seed, recipe, True).items():
            error, size = float((t.float() - wanted[name].float()).norm()), float(wanted[name].float().norm())
            assert error <= 0.02 * size, (seed, name, error, size)
    if by == "delayed":
        assert_near_states(m, twin)

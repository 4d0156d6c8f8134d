"""Amaxes folded by the kernel on a GPU, against the rule and against PyTorch's way."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import not_finite, scale_update, states
from te_fuser.quantization.state import ROLES, blocks
from te_fuser.recipe import DelayedScaling
from tests.kernels.test_quantizers_amaxes import folded_wrongly
from tests.quantization.folded import ensure, state_of

GPU = torch.device("cuda", 0)
RECIPES = {
    "largest": DelayedScaling(amax_history_len=700),
    "newest": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent", margin=1),
    "own": DelayedScaling(amax_history_len=2, amax_compute_algo=lambda history: history.sum(0)),
}


def test_values() -> None:
    assert not folded_wrongly(3, "cuda:0")


def recorded(model: Any, recipe: DelayedScaling, seed: int) -> None:
    """Record the amaxes of a step, one of them infinite."""
    with te.autocast(recipe=recipe):
        for op in model:
            ensure(op, recipe)
    rng = torch.Generator(GPU).manual_seed(seed)
    for k, op in enumerate(model):
        for role in ROLES:
            amax = torch.rand((), device=GPU, generator=rng) * 10.0**k
            state_of(op).numbers[f"{role}_amax"].copy_(amax if (k, seed) != (1, 2) else torch.inf)


@pytest.mark.parametrize("name", RECIPES)
def test_as_pytorch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit; the kernel launches once a fold and nothing else does, but for functions of somebody's own."""
    model = te.Sequential(*(ops.MatMul(16, 16, device=GPU) for _ in range(5)))
    twin = copy.deepcopy(model)
    for seed in range(4):
        recorded(model, RECIPES[name], seed)
        scale_update.update()
    found = states(model), not_finite(model)
    monkeypatch.setattr(scale_update, "has_kernel", lambda device: False)
    for seed in range(4):
        recorded(twin, RECIPES[name], seed)
        scale_update.update()
    assert found[1] == not_finite(twin) and found[1]
    for key, pair in states(twin).items():
        assert all(torch.equal(a, b) for a, b in zip(found[0][key], pair, strict=True)), key


def test_a_fold_is_one_kernel() -> None:
    """And one copy more, of the scales to where CUDA graphs read them, once there are such graphs."""
    gc.collect()  # of products of tests before
    model = te.Sequential(*(ops.MatMul(16, 16, device=GPU) for _ in range(5)))
    for seed in range(2):
        recorded(model, RECIPES["largest"], seed)
        scale_update.update()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        scale_update.update()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    used = [block for block in blocks() if block.device == GPU and block.states()]
    graphs = sum(block.live is not None for block in used)
    assert names.count("fold_amaxes") == len(used) and len(names) == len(used) + graphs, names

"""Regions of FP8 on models that two ranks share and two more train by `fully_shard`, against the whole model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.parallel.models import spread
from tests.parallel.ranks import on_ranks
from tests.parallel.test_two_meshes import mesh_of, whole

RANKS = 4
TOKENS, BATCH, STEPS = 8, 4, 3
RECIPES: dict[str, tuple[Recipe, int]] = {  # and features, of whose parts, a rank's each, the recipe takes all
    "delayed": (DelayedScaling(amax_history_len=2), 32),
    "current": (Float8CurrentScaling(), 32),
    "blocks": (Float8BlockScaling(), 256),
}


def mlp(features: int) -> te.Sequential:
    torch.manual_seed(0)
    inner = 2 * features
    layer = te.Residual(ops.LayerNorm(features), ops.Linear(features, inner), ops.GELU(), ops.Linear(inner, features))
    return te.Sequential(layer, te.LayerNormMLP(features, inner, device="cpu"))


def train(model: Any, recipe: Recipe | None, features: int, first: bool | None, mesh: DeviceMesh | None = None) -> None:
    """Steps on a rank's samples; without a mesh on all. Gradients are those of the last one."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    dtype = torch.float32 if recipe else torch.float64
    for step in range(STEPS):
        if step:
            optimizer.step()
        optimizer.zero_grad()
        x = torch.randn(TOKENS, BATCH, features, generator=torch.Generator().manual_seed(step)).to(dtype)
        own = x if mesh is None else x.chunk(2, 1)[mesh["dp"].get_local_rank()]
        group = None if mesh is None else dist.group.WORLD
        with te.autocast(enabled=recipe is not None, recipe=recipe, amax_reduction_group=group), microbatch(first):
            y = model(own)
        (y.square().sum() * (0.5 if mesh is None else 1.0)).backward()  # `fully_shard` averages over two


def gradients(model: Any, like: Any) -> dict[str, torch.Tensor]:
    return whole({name: p.grad for name, p in model.named_parameters()}, like, model)


@pytest.mark.parametrize(("by", "first"), [("delayed", True), ("current", None), ("blocks", True)])
@on_ranks
def test_training(by: str, first: bool | None) -> None:
    """Errors are as large as the whole model's in that region; by delayed scaling, with agreed scales, the same."""
    (recipe, features), mesh = RECIPES[by], mesh_of()
    twin = mlp(features)
    model = spread(te.parallelize(copy.deepcopy(twin), mesh["tp"]), mesh["dp"])
    exact = copy.deepcopy(twin).double()
    train(model, recipe, features, first, mesh)
    train(twin, recipe, features, first)
    train(exact, None, features, None)
    found, known = gradients(model, twin), gradients(twin, twin)
    for name, right in gradients(exact, exact).items():
        error, usual = (float((t[name].double() - right).norm()) for t in (found, known))
        size, apart = float(right.norm()), float((found[name] - known[name]).norm())
        assert error <= 1.1 * usual + 0.01 * size, (name, error, usual)
        assert 0.0 < usual < 0.2 * size, (name, usual, size)
        if by == "delayed":
            assert apart <= 0.005 * size, (name, apart, size)
    if by == "delayed":
        for (name, own), (other, theirs) in zip(*(sorted(states(m).items()) for m in (model, twin)), strict=True):
            halves = 2.0 if name.endswith("output_gradient") else 1.0  # before the average
            assert name == other
            torch.testing.assert_close(own[1], halves * theirs[1], rtol=1e-4, atol=1e-6)

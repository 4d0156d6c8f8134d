"""Plans whose kernels store transposed what products of 8 bits read so, on a GPU: against steps that turn rows."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch

import te_fuser as te
from te_fuser import fusions
from te_fuser.fuser.plan import layouts
from tests.float8 import OURS
from tests.gpu.test_float8_regions import BF16, GPU, RECIPE, F, apart, assert_as_emulated, compare, data, made, step

pytestmark = pytest.mark.usefixtures("narrow_products")
NAMES = ("mlp", "gated", "te.LayerNormMLP gated", "te.TransformerLayer")


def stored(model: Any, x: torch.Tensor) -> set[str]:
    """The steps that give something transposed."""
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        plans = model.explain(x, details=True).plans
    steps = [s for plan in plans for s in plan.steps]
    return {s.name for s in steps if any(r.form.layout == "transposed" for r in s.writes())}


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("name", NAMES)
def test_kernels_and_steps_that_turn_give_the_same(name: str, memory: str) -> None:
    model, _ = made(name)
    model.memory = memory
    twin = copy.deepcopy(model)
    x = data(3, 67, 3, F)
    for seed in range(2):
        found = step(model, x, RECIPE, seed)
        with mock.patch.object(layouts, "tile_refusal", lambda *given: "not now"):
            wanted = step(twin, x, RECIPE, seed)
        assert found.keys() == wanted.keys()
        for key, exact in wanted.items():
            if not key.endswith("key_bias"):  # other kernels may round before attention, see `compare`
                most = 0.1 if "Transformer" in name else 0.01
                assert apart(found[key], exact) < most, (key, apart(found[key], exact))
    assert stored(model, x) - {"transposed8"}
    with mock.patch.object(layouts, "tile_refusal", lambda *given: "not now"):
        turning = {name for name in stored(copy.deepcopy(twin), x) if not name.startswith("attention")}
        assert turning == {"transposed8"}


@pytest.mark.parametrize("name", NAMES)
def test_each_step_is_right(name: str) -> None:
    """As `verify` looks at it, in the forms that it stores."""
    model, twin = made(name)
    model.verify = True
    assert_as_emulated(model, twin, data(4, 33, F) if "Transformer" not in name else data(4, 33, 3, F))


def test_large_and_repeated() -> None:
    """Kernels of many tiles; a call repeats bit for bit."""
    torch.manual_seed(0)
    model = te.LayerNormMLP(1024, 4096).to(GPU, BF16)
    twin, x = copy.deepcopy(model), data(5, 4099, 1024)
    found = step(model, x, RECIPE)
    again = step(copy.deepcopy(twin), x, RECIPE)
    with fusions.disabled(*OURS):
        compare(found, step(twin, x, RECIPE))
    assert all(torch.equal(t, again[key]) for key, t in found.items())

"""What products of 8 bits gain, as plans say it."""

from __future__ import annotations

import pytest
import torch

import te_fuser as te
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.step_rows import gains
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Recipe

ROWS, F, FFN = 8192, 4096, 16384


def explained(recipe: Recipe | None, device: str, odd: bool = False) -> tuple[str, Plan]:
    with torch.device("meta"):
        model = te.Sequential(te.LayerNormMLP(F, FFN), *([te.Linear(F, 100)] if odd else [])).bfloat16()
        x = torch.empty(ROWS, F, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        found = model.explain(x, device=device, details=True)
    return str(found), found.plans[0]


def test_they_are_the_steps_of_the_products_beside_these_alone() -> None:
    said, plan = explained(DelayedScaling(), "h200", odd=True)
    first, second = gains(plan)
    assert (first.path, second.path) == ("0.1", "0.4") and first.dtype == second.dtype == "bfloat16"
    alone = 3 * (2.0 * ROWS * F * FFN / DEVICES["h200"].matrix_rate["bfloat16"] + 4e-6)
    assert first.own_seconds == pytest.approx(alone) and second.own_seconds == pytest.approx(alone)
    of = [s.seconds for s in plan.steps if s.cost.flops and (s.cost.dtype or "").startswith("float8")]
    assert len(of) == 6 and first.seconds + second.seconds == pytest.approx(sum(of))
    assert first.own_seconds > 1.8 * first.seconds
    line = next(line.split() for line in said.splitlines() if line.split()[:1] == ["together"])
    assert float(line[3]) == pytest.approx(1e3 * (2 * alone - sum(of)), abs=2e-3)
    assert max(map(len, said.splitlines())) <= 110


def test_products_that_stay_gain_nothing() -> None:
    _, plan = explained(DelayedScaling(override_linear_precision=(False, False, True)), "h200")
    _, whole = explained(DelayedScaling(), "h200")
    assert gains(plan)[0].seconds > 1.3 * gains(whole)[0].seconds  # dW in bfloat16 is among them
    assert gains(plan)[0].own_seconds == gains(whole)[0].own_seconds
    said, plan = explained(None, "h200")
    assert gains(plan) == [] and "Products in 8 bits" not in said


def test_what_is_emulated_loses() -> None:
    _, plan = explained(Float8BlockScaling(), "b200")
    assert all(gain.seconds > gain.own_seconds for gain in gains(plan))
    _, plan = explained(Float8BlockScaling(), "h200")
    assert all(gain.seconds < gain.own_seconds for gain in gains(plan))
    _, plan = explained(DelayedScaling(), "cpu")
    assert all(gain.seconds > gain.own_seconds for gain in gains(plan))

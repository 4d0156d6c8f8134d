"""Rows of plans as they are shown: what each pass did, which one made each step, and what 8 bits gain."""

from __future__ import annotations

import pytest
import torch

import te_fuser
import te_fuser as te
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.passes import PassRecord
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.step_rows import gains
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Recipe


def mlp() -> Sequential:
    return Sequential(Residual(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16)))


def entries(*texts: str) -> tuple[tuple[str, object], ...]:
    return tuple((text, object()) for text in texts)


def test_pass_record_added_removed_changed_moved() -> None:
    first = entries("a", "b", "b", "c")
    after = (first[3], *entries("b"), first[1], *entries("d"))
    record = PassRecord("some pass", "steps", first, after)
    assert (record.added, record.removed, record.changed, record.moved) == (["d"], ["a"], ["b"], True)
    same = PassRecord("none", "steps", first, first)
    assert (same.added, same.removed, same.changed, same.moved) == ([], [], [], False)


def test_explain_passes_are_all_there_in_their_order() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mlp().explain(torch.randn(6, 16, requires_grad=True), passes=True, details=True)
    (records,) = found.passes
    assert [r.name for r in records] == ["list", *pipeline.LIST_PASSES, "cover", *pipeline.PLAN_PASSES]
    (cast,) = (r for r in records if r.name == "autocast")
    assert "MatMul '0.1.matmul'; reads weight in bfloat16" in cast.added and "MatMul '0.1.matmul'" in cast.removed
    text = str(found)
    assert "Passes\n" in text and "+ MatMul '0.1.matmul'; reads weight in bfloat16" in text
    (plan,), (makers,) = found.plans, found.makers
    assert [maker for _, maker in makers] == ["cover"] * len(plan.steps)
    assert f"Steps made by: cover {len(plan.steps)}" in text


def test_explain_passes_names_what_surrounds_a_call_and_who_made_a_step() -> None:
    recipe = te_fuser.recipe.Float8CurrentScaling()
    with te_fuser.autocast(recipe=recipe):
        found = mlp().explain(torch.randn(64, 16, requires_grad=True), passes=True, details=True)
    (records,), (makers,) = found.passes, found.makers
    around = records[len(pipeline.LIST_PASSES) + 1]
    assert around.over == "ops" and any("Quantize" in text for text in around.added)
    texts = [text for text, _ in records[-1].after]
    assert [text for text, _ in makers] == texts
    assert "cover" in {maker for _, maker in makers} <= {"cover", *pipeline.PLAN_PASSES}


@pytest.mark.parametrize("measure", [False, True])
def test_explain_passes_of_several_plans(measure: bool) -> None:
    model = Sequential(ops.LayerNorm(16), torch.nn.Identity(), *mlp())
    x = torch.randn(6, 16, requires_grad=True)
    found = model.explain(x, passes=True, measure=measure, details=True)
    assert len(found.passes) == len(found.plans) == 2
    assert str(found).count("\nPasses\n") == 2
    assert "Passes" not in str(model.explain(x, measure=measure, details=True))


# -------------------------------------------------------------------------------- what products of 8 bits gain


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

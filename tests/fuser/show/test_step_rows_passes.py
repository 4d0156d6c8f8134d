"""`explain(passes=True)`: what each pass added, took away and changed, and which one made each step."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.passes import PassRecord


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

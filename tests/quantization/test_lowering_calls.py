"""Calls in regions: which plan runs, what is recorded when, and what is said of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import lowering
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.quantization.regions import OTHER, amaxes, mlp, on, trained
from tests.quantization.test_lowering import FFN, MODELS, RECIPE, F, data


def test_a_region_has_plans_of_its_own_that_are_kept() -> None:
    model, x = mlp(), data(1)
    outside = model(x)
    for _ in range(3):
        with on():
            model(x)
        with on(OTHER):
            model(x)
        assert torch.equal(model(x), outside)
    assert len(model.plans_kept()) == 3


def test_the_same_region_again_is_a_known_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = trained(mlp()), data(1)
    with on():
        model(x)
    fuser = model._prepared()[0].fuser

    def refuse(*_: Any) -> None:
        raise AssertionError("it was not known")

    monkeypatch.setattr(fuser, "_prepare", refuse)
    for step in range(3):
        with on(DelayedScaling(amax_history_len=3)):
            y = model(data(step, scale=1.0 + step))
        y.sum().backward()
    with pytest.raises(AssertionError, match="not known"):
        model(x)
    with on(OTHER), pytest.raises(AssertionError, match="not known"):
        model(x)


def test_eval_is_quantized_too() -> None:
    model = trained(mlp()).eval()
    x = data(3)
    with torch.no_grad():
        plain = model(x)
        with on():
            y = model(x)
            assert torch.allclose(y, model.reference(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(y, plain) and (y - plain).abs().max() < 0.2


def test_calibrating_without_gradients_says_that_it_records_nothing() -> None:
    lowering.say_once.cache_clear()
    model = mlp()
    with torch.no_grad(), on(enabled=False, calibrating=True), pytest.warns(UserWarning, match="records nothing"):
        model(data(2))
    assert amaxes(model) == {}


def test_explain_says_what_runs_how() -> None:
    said = plan_of(MODELS["odd"](), RECIPE)
    assert "products in 8 bits (E4M3, gradients in E5M2), emulated on cpu: multiplied in float32: 4.matmul" in said
    assert "0.matmul stays in its own precision: its out_features, 24, are no multiple of 16" in said
    assert "2.matmul stays in its own precision: its in_features, 24, are no multiple of 16" in said
    kept = DelayedScaling(override_linear_precision=(False, False, True))
    assert "0.matmul; but dW in its own precision, as override_linear" in plan_of(MODELS["linear"](), kept)
    model = te.Sequential(ops.Linear(F, F), ops.Linear(F, F))
    te.precision(model, {"1": None})
    said = plan_of(model, RECIPE)
    assert "float32: 0.matmul" in said and "1.matmul stays in its own precision: te.precision says so" in said


def plan_of(model: Any, recipe: DelayedScaling) -> str:
    with on(recipe):
        return " ".join(str(model.explain(data(1), details=True)).split())


def test_an_x_of_another_dtype_is_refused_as_outside() -> None:
    model = mlp()
    with pytest.raises(TypeError, match="convert"):
        te.Sequential(ops.Linear(F, F))(data(1).bfloat16())
    with on(), pytest.raises(TypeError, match="takes x in float32"):
        te.Sequential(ops.Linear(F, F))(data(1).bfloat16())
    with on():
        model(data(1))


def test_a_kernel_quantizes_with_what_is_before_it() -> None:
    with on():
        plan = mlp().plan(data(1).requires_grad_())
    names = [step.name for step in plan.forward]
    assert any("gelu" in name and "quantize" in name for name in names), names
    assert sum(v.spec.dtype == torch.float8_e4m3fn for v in plan.graph.values) == 2
    kept = {k.ref.label(plan.graph): k.ref.bytes(plan.graph) for s in plan.segments for k in s.kept}
    assert kept["quantize.output"] in (15 * F, 15 * FFN)


@pytest.mark.parametrize("name", ["te.LayerNormMLP", "te.MultiheadAttention", "te.TransformerLayer"])
def test_presets_are_known_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = trained(MODELS[name]())
    seen = []
    prepare = te.Fuser._prepare
    monkeypatch.setattr(te.Fuser, "_prepare", lambda *call: seen.append(1) or prepare(*call))
    for step in range(3):
        with on():
            model(data(step)).sum().backward()
    assert len(seen) <= 1


def test_measuring_records_nothing() -> None:
    model = trained(mlp())
    before = amaxes(model)
    with on():
        model.explain(data(1, scale=1e4), measure=True, details=True)
    assert amaxes(model) == before


def test_a_model_without_values_is_planned_and_stays_as_it_is() -> None:
    with torch.device("meta"):
        model = te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), te.LayerNormMLP(FFN, F))
    with on():
        plan = model.plan(torch.empty(5, F, device="meta", requires_grad=True), device="h200")
    assert any("quantize" in step.name for step in plan.forward)
    assert not [name for name, _ in model.named_buffers()]
    real = model.to_empty(device="cpu")
    for p in real.parameters():
        torch.nn.init.normal_(p)
    with on():
        real(data(1)).sum().backward()
    assert float(real[1].fp8_scale[0]) == 1.0


@pytest.mark.parametrize(
    "recipe", [RECIPE, Float8CurrentScaling(), MXFP8BlockScaling()], ids=lambda r: type(r).__name__
)
def test_gradients_of_a_reference_are_differentiated_no_more(recipe: Recipe) -> None:
    model, x = trained(mlp()), data(1).requires_grad_()
    with on(recipe):
        y = model.reference(x)
    wanted = [x, *model.parameters()]
    once = torch.autograd.grad(y.square().sum(), wanted, retain_graph=True)
    again = torch.autograd.grad(y.square().sum(), wanted, create_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))
    with pytest.raises(RuntimeError, match="are not differentiated again.*outside of regions of FP8"):
        again[0].square().sum().backward()

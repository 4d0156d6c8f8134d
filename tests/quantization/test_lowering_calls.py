"""Calls and looks in regions: which plan runs, what is recorded when, what is said of it; looks change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.utils.parametrize

import te_fuser as te
from te_fuser import ops
from te_fuser.config import config
from te_fuser.quantization import lowering, microbatch, states
from te_fuser.quantization.state import blocks
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe
from tests.quantization.regions import FFN, MODELS, OTHER, RECIPE, F, Reference, amaxes, data, mlp, on, trained
from tests.refused import raises


@pytest.mark.parametrize("name", ["mlp", "te.LayerNormMLP", "te.MultiheadAttention", "te.TransformerLayer"])
def test_the_same_region_again_is_a_known_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, seen, prepare = trained(MODELS[name]()), list[int](), te.Fuser._prepare
    monkeypatch.setattr(te.Fuser, "_prepare", lambda *call: seen.append(1) or prepare(*call))
    for step in range(4):
        with on(DelayedScaling(amax_history_len=3)):
            model(data(step, scale=1.0 + step)).sum().backward()
    assert len(seen) <= 1
    seen.clear()
    model(data(1))
    assert len(seen) == 1
    with on(OTHER):
        model(data(1))
    assert len(seen) == 2 and (name != "mlp" or len(model.plans_kept()) == 3)


def test_eval_is_quantized_too() -> None:
    model = trained(mlp()).eval()
    x = data(3)
    with torch.no_grad():
        plain = model(x)
        with on():
            y = model(x)
            assert torch.allclose(y, model.reference(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(y, plain) and (y - plain).abs().max() < 0.2


def test_calibrating_without_gradients_and_measuring_record_nothing() -> None:
    lowering.say_once.cache_clear()
    model = mlp()
    with torch.no_grad(), on(enabled=False, calibrating=True), pytest.warns(UserWarning, match="records nothing"):
        model(data(2))
    assert amaxes(model) == {}
    before = amaxes(trained(model))
    with on():
        model.explain(data(1, scale=1e4), measure=True, details=True)
    assert amaxes(model) == before


def test_explain_says_what_runs_how() -> None:
    said = plan_of(MODELS["odd"](), RECIPE)
    assert "products in 8 bits (E4M3, gradients in E5M2), emulated on cpu: multiplied in float32: 4.matmul" in said
    assert "0.matmul stays in its own precision: its out_features, 24, are no multiple of 16" in said
    assert "2.matmul stays in its own precision: its in_features, 24, are no multiple of 16" in said
    kept = DelayedScaling(override_linear_precision=(False, False, True))
    assert "0.matmul; but dW in its own precision, as override_linear" in plan_of(MODELS["linear"](), kept)
    model = te.Sequential(*(ops.Linear(F, F) for _ in range(3)))
    te.precision(model, {"1": None, "2": DelayedScaling(fp8_format=Format.E4M3)})
    said = plan_of(model, RECIPE)
    assert "float32: 0.matmul" in said and "(E4M3), emulated" in said
    assert "1.matmul stays in its own precision: te.precision says so" in said


def plan_of(model: Any, recipe: DelayedScaling) -> str:
    with on(recipe):
        return " ".join(str(model.explain(data(1), details=True)).split())


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


RECIPE = DelayedScaling(amax_history_len=4)


def _trained(y: torch.Tensor) -> None:
    if y.requires_grad:
        y.sum().backward()


LOOKS: dict[str, Callable[[Any, torch.Tensor], object]] = {
    "plans": lambda model, x: model.plans(x),
    "explain": lambda model, x: model.explain(x, details=True),
    "measure": lambda model, x: model.explain(x, measure=True, details=True),
    "h200": lambda model, x: model.plans(x, device="h200"),
    "verify": lambda model, x: te.verify(model, x),
    "reference": lambda model, x: _trained(model.reference(x.requires_grad_())),
    "no_grad": lambda model, x: torch.no_grad()(model)(x),
    "inference_mode": lambda model, x: torch.inference_mode()(model)(x),
    "export": lambda model, x: torch.export.export(Reference(model), (x,)),
}


def model_of(seed: int) -> te.Sequential:
    torch.manual_seed(seed)
    return te.Sequential(ops.LayerNorm(F), ops.Linear(F, F), te.LayerNormMLP(F, FFN))


@pytest.mark.parametrize(
    ("look", "first"), [*((look, None) for look in LOOKS), ("measure", True), ("reference", True), ("no_grad", True)]
)
def test_looks_leave_no_buffers(look: str, first: bool | None) -> None:
    """And the first call behind is as without them."""
    model, x = model_of(0), data(0)
    twin = copy.deepcopy(model)
    with te.autocast(recipe=RECIPE), microbatch(first):
        LOOKS[look](model, x)
    assert not dict(model.named_buffers()) and states(model) == {} and not any("fp8" in n for n in model.state_dict())
    for p in model.parameters():
        p.grad = None
    for m in (model, twin):
        for k in range(2):
            with te.autocast(recipe=RECIPE), microbatch(first):
                y = m(data(k))
            y.square().sum().backward()
    for name, p in model.named_parameters():
        assert torch.equal(p.grad, twin.get_parameter(name).grad)  # type: ignore[arg-type]
    for name, (scale, history) in states(twin).items():
        assert torch.equal(states(model)[name][0], scale) and torch.equal(states(model)[name][1], history)


@pytest.mark.parametrize("look", ["measure", "verify", "no_grad", "inference_mode", "export"])
def test_looks_by_another_recipe_leave_history_and_recipe(look: str) -> None:
    model, x = model_of(0), data(0)
    with te.autocast(recipe=RECIPE):
        model(x).sum().backward()
    before = {name: (s.clone(), h.clone()) for name, (s, h) in states(model).items()}
    with te.autocast(recipe=DelayedScaling(amax_history_len=7, margin=3)), torch.no_grad():
        LOOKS[look](model, x)
    after = states(model)
    assert all(torch.equal(a, b) for name in before for a, b in zip(before[name], after[name], strict=True))


def test_weights_of_calls_have_no_state_of_the_model_and_tuning_leaves_theirs() -> None:
    model, x, w = te.Linear(F, FFN), data(0), torch.randn(FFN, F)
    with te.autocast(recipe=RECIPE):
        model(x, weight=w).sum().backward()
        said = " ".join(str(model.explain(x, weight=w, details=True)).split())
    assert "weights come with the call, so their scales are among no states() and in no state_dict" in said
    assert states(model) == {}
    # Their scales are kept beside the list, where no module of the model has them.
    layer, x, weight = te.Linear(32, 32), torch.randn(8, 32, requires_grad=True), torch.randn(32, 32)
    with te.autocast(recipe=RECIPE):
        layer(x, weight=weight).sum().backward()
        before = [block.amaxes.clone() for block in blocks()]
        layer.tune(100.0 * x.detach(), weight=weight)
    assert any(bool(t.any()) for t in before)
    assert all(torch.equal(block.amaxes, t) for block, t in zip(blocks(), before, strict=True))


HAS = "8 bits take compute capability 8.9, this GPU has 8.0"
OF_BLOCKS = "a scale for each block of 128 numbers take compute capability 9.0, this GPU has 8.9"
ON_GPUS: dict[tuple[str, Recipe], str] = {
    ("h200", RECIPE): "",
    ("h200", Float8BlockScaling()): "",
    ("a100", RECIPE): HAS,
    ("a100", Float8BlockScaling()): HAS,
    ("l4", RECIPE): "",
    ("l4", Float8BlockScaling()): OF_BLOCKS,
    ("h200", MXFP8BlockScaling()): "a scale for each 32 numbers are emulated alone",
}


@pytest.mark.parametrize("case", ON_GPUS, ids=lambda case: f"{case[0]}-{type(case[1]).__name__}")
def test_plans_for_a_gpu_say_what_that_does(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Notes say that the GPU has such products, refuses them, or emulates them."""
    (name, recipe), why = case, ON_GPUS[case]
    model, x = te.Sequential(ops.Linear(128, 128)).to(torch.bfloat16), torch.randn(16, 128).bfloat16()

    def said() -> str:
        with te.autocast(recipe=recipe):
            notes = model.plan(x, device=name).notes
        (found,) = [note for note in notes if note.startswith("products in 8 bits")]
        assert found.endswith(": 0.matmul")
        return found.rsplit(": ", 1)[0]

    refused, emulated = "refused when they are called, since products ", "emulated, as te_fuser.config.emulate_fp8 says"
    assert why in said() and (refused in said()) == bool(why)
    assert said().endswith("with te_fuser.config.emulate_fp8 = True" if why else ")")
    monkeypatch.setattr(config, "emulate_fp8", True)
    assert why in said() and (emulated in said()) == bool(why) and refused not in said()


def test_what_a_device_refuses_may_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: torch.device, scales: str) -> None:
        raise RuntimeError("this GPU has none")

    model, x = model_of(0), data(0)
    with te.autocast(recipe=RECIPE):
        model(x)
    monkeypatch.setattr(lowering, "check_machine", refused)
    with te.autocast(recipe=RECIPE):
        assert model.plan(x).forward and model.plan(x, device="h200").forward
        raises(RuntimeError, "this GPU has none", model, data(0, 2, F))

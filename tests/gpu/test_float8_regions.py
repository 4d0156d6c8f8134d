"""Models in regions of FP8 on a GPU: by cuBLASLt against the emulation there, in values, gradients and scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling, Format
from tests.float8 import OURS, models

pytestmark = pytest.mark.usefixtures("narrow_products")

GPU = torch.device("cuda", 0)
F, FFN, HEADS = 256, 512, 4
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
RECIPE = DelayedScaling(amax_history_len=3)
RECIPES = {
    "hybrid": RECIPE,
    "e4m3": DelayedScaling(fp8_format=Format.E4M3, amax_history_len=2, margin=1),
    "kept_dw": DelayedScaling(override_linear_precision=(False, False, True)),
    "kept_y": DelayedScaling(override_linear_precision=(True, False, False)),
    "kept_dx": DelayedScaling(override_linear_precision=(False, True, False), fp8_format=Format.E4M3),
}
MODELS: dict[str, Callable[[], Any]] = {
    **models(F, FFN),
    "partly": lambda: te.Sequential(ops.Linear(F, 24), ops.GELU(), ops.Linear(24, F), ops.GELU(), ops.Linear(F, F)),
    "te.LayerNormLinear": lambda: te.LayerNormLinear(F, FFN),
    "te.LayerNormMLP gated": lambda: te.LayerNormMLP(F, FFN, normalization="RMSNorm", activation="swiglu"),
    "te.TransformerLayer": lambda: te.TransformerLayer(F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
}


def made(name: str, dtype: torch.dtype = BF16) -> tuple[Any, Any]:
    """A model, and another like it."""
    torch.manual_seed(0)
    model = MODELS[name]().to(GPU, dtype)
    return model, copy.deepcopy(model)


def data(seed: int, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator(GPU).manual_seed(seed), device=GPU).to(dtype)


def apart(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Root mean square of the difference, as a share of that of `wanted`."""
    if not wanted.numel():
        return 0.0
    difference, size = (t.double().square().mean().sqrt().item() for t in (found.double() - wanted.double(), wanted))
    return difference / size if size else difference


def step(
    model: Any,
    x: torch.Tensor,
    recipe: DelayedScaling,
    seed: int = 7,
    autocast: bool = False,
    first: bool | None = None,
) -> dict[str, torch.Tensor]:
    """Output and gradients of one call in a region, with a gradient that follows from the seed."""
    leaf, region = x.clone().requires_grad_(), te.fp8_autocast(enabled=True, fp8_recipe=recipe)
    with region, microbatch(first), torch.autocast("cuda", BF16, enabled=autocast):
        y = model(leaf)
    y.backward(data(seed, *y.shape, dtype=y.dtype))
    found = {"output": y.detach(), "x": leaf.grad}
    found |= {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    return found


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """Numbers next to a tie may be rounded either way, which is a step of 8 bits for some of them.

    What attention's backward gives follows from such numbers, and is rounded so again.
    """
    assert found.keys() == wanted.keys()
    for name, exact in wanted.items():
        assert found[name].dtype == exact.dtype and found[name].shape == exact.shape, name
        if not name.endswith("key_bias"):  # which softmax takes away: nothing but rounding
            most = 0.1 if name.startswith("self_attention") else 0.05
            assert apart(found[name], exact) < most, (name, apart(found[name], exact))


def assert_as_emulated(model: Any, twin: Any, x: torch.Tensor, recipe: Any = RECIPE, **how: Any) -> None:
    """A step of the model, which the twin goes through by the emulation."""
    found = step(model, x, recipe, **how)
    with fusions.disabled(*OURS):
        compare(found, step(twin, x, recipe, **how))


@pytest.mark.parametrize("name", MODELS)
def test_as_emulated(name: str) -> None:
    """For some steps, each by the scales that follow from those before."""
    model, twin = made(name)
    for k in range(3):
        assert_as_emulated(model, twin, data(k, 130, 3, F) * (1.0 + k))
    ours, theirs = states(model), states(twin)
    assert ours.keys() == theirs.keys() and ours
    for key, (scale, history) in theirs.items():
        torch.testing.assert_close(ours[key][0], scale, rtol=0.05, atol=0.0)
        torch.testing.assert_close(ours[key][1], history, rtol=0.05, atol=0.0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", [BF16, F16, F32])
def test_recipes_and_dtypes(dtype: torch.dtype, recipe: str) -> None:
    model, twin = made("mlp", dtype)
    x = data(0, 333, F, dtype=dtype)
    for k in range(2):
        assert_as_emulated(model, twin, x, RECIPES[recipe], seed=k)


def test_autocast() -> None:
    """Weights in float32 are quantized from that, and get gradients in it."""
    assert_as_emulated(*made("mlp", F32), data(0, 333, F, dtype=F32), autocast=True)


@pytest.mark.parametrize("shape", [(1, F), (16, F), (17, F), (4099, F), (0, F), (3, 0, F)])
def test_any_number_of_tokens(shape: tuple[int, ...]) -> None:
    model, twin = made("mlp")
    x = data(0, *shape)
    found = step(model, x, RECIPE)
    with fusions.disabled(*OURS):
        wanted = step(twin, x, RECIPE)
    if x.numel():
        compare(found, wanted)
    else:
        assert all(torch.equal(found[name], exact) for name, exact in wanted.items())


def test_cublaslt_runs_all_three() -> None:
    model, _ = made("mlp")
    x = data(0, 512, F).requires_grad_()
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        plan = model.plan(x)
    names = [s.name for s in (*plan.forward, *plan.backward)]
    assert (
        sum(name in ("float8_matmul", "float8_matmul_bias") for name in names) == 2
        and names.count("float8_matmul_backward") == 4
    ), names


def test_all_weights_by_one_launch() -> None:
    """And kept ones by none."""
    model, _ = made("te.TransformerLayer")
    x = data(0, 128, 2, F)
    for first, count in ((None, 1), (False, 0)):
        step(model, x, RECIPE, first=True)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            step(model, x, RECIPE, first=first)
            torch.cuda.synchronize()
        assert sum("quantize_weight" in event.name for event in seen.events() or ()) == count


@pytest.mark.parametrize("name", MODELS)
def test_micro_batches(name: str) -> None:
    """Bit for bit as where each call makes the weights in 8 bits anew, and near the emulation."""
    model, twin = made(name)
    emulated = copy.deepcopy(twin)
    for _ in range(2):  # from then on the scales of weights, which nothing changes, stay
        for each in (model, twin):
            step(each, data(4, 130, 3, F), RECIPE)
        with fusions.disabled(*OURS):
            step(emulated, data(4, 130, 3, F), RECIPE)
    for k, first in enumerate((True, False, False, True)):
        x = data(k, 130, 3, F)
        found, anew = step(model, x, RECIPE, first=first), step(twin, x, RECIPE)
        for key, t in anew.items():
            in_any_order = "Transformer" in name  # as attention adds up
            same = apart(found[key], t) < 0.01 if in_any_order else torch.equal(found[key], t)
            assert same, key
        with fusions.disabled(*OURS):
            compare(found, step(emulated, x, RECIPE, first=first))
    ours, theirs = states(model), states(twin)
    assert all(torch.equal(ours[key][0], scale) for key, (scale, _) in theirs.items() if not key.endswith(".weight"))


def test_what_a_call_makes_of_weights_is_its_own() -> None:
    """Backwards that come late, twice, and after weights were changed."""
    model, twin = made("te.LayerNormMLP gated")
    results = []
    for m in (model, twin):
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            results.append([m(data(k, 200, F)) for k in range(2)])
    for p in model.parameters():
        p.data.mul_(-1.0) if p.dim() == 2 else None
    with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        model(data(2, 200, F))
    for y, z in zip(*map(reversed, results), strict=True):
        for _ in range(2):
            gradients = [
                torch.autograd.grad(t.float().square().sum(), m.layer_norm_weight, retain_graph=True)[0]
                for t, m in ((y, model), (z, twin))
            ]
            torch.testing.assert_close(*gradients, rtol=1e-2, atol=1e-2)


def test_what_runs_again_makes_weights_again() -> None:
    model, twin = made("te.LayerNormMLP gated")
    x = data(0, 200, F)
    gradients = []
    for m, how in ((model, True), (twin, False)):
        leaf = x.clone().requires_grad_()
        with te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
            y = te.checkpoint(m, leaf) if how else m(leaf)
        y.float().square().sum().backward()
        gradients.append(leaf.grad)
    assert torch.equal(*gradients)


@pytest.mark.parametrize("name", MODELS)
def test_weights_in_8_bits_alone(name: str) -> None:
    """By the library's products, near the emulation and the wide model that they were loaded from."""
    _, wide = made(name)
    with te.quantized_model_init():
        narrow = MODELS[name]().to(GPU, BF16)
    narrow.load_state_dict(wide.state_dict(), strict=False)
    x = data(0, 130, 3, F)
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        y, z = narrow(x), wide(x)
        with fusions.disabled(*OURS):
            assert apart(y, narrow(x)) < 0.03
    assert apart(y, z) < 0.1  # the wide model's weights have the scale 1 in its first call: both are rounded, apart


def test_near_what_is_not_quantized() -> None:
    model, twin = made("te.TransformerLayer")
    x = data(0, 128, 2, F)
    step(model, x, RECIPE)  # the first call's scales are 1
    found = step(model, x, RECIPE)
    leaf = x.clone().requires_grad_()
    y = twin(leaf)
    y.backward(data(7, *y.shape))
    assert apart(found["output"], y.detach()) < 0.05
    assert apart(found["x"], leaf.grad) < 0.2  # type: ignore[arg-type]


@pytest.mark.parametrize("main", [F32, BF16])
def test_main_grad(main: torch.dtype) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        model = te.Sequential(
            ops.RMSNorm(F),
            ops.MatMul(F, FFN, accumulate_into_main_grad=True),
            ops.GELU(),
            ops.MatMul(FFN, F, accumulate_into_main_grad=True),
        ).to(GPU, BF16)
        for k in (1, 3):
            model[k].weight.main_grad = torch.ones_like(model[k].weight, dtype=main)
        models.append(model)
    for seed in range(2):
        for model, off in zip(models, ((), OURS), strict=True):
            with fusions.disabled(*off):
                step(model, data(0, 300, F), RECIPE, seed)
    for k in (1, 3):
        ours, theirs = (model[k].weight.main_grad for model in models)
        assert apart(ours - 1.0, theirs - 1.0) < 0.05


def test_frozen_weights_and_no_grad() -> None:
    model, twin = made("mlp")
    for m in (model, twin):
        for name, p in m.named_parameters():
            p.requires_grad_("bias" in name)
    x = data(0, 300, F)
    assert_as_emulated(model, twin, x)
    before = {key: (a.clone(), b.clone()) for key, (a, b) in states(model).items()}
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=RECIPE):
        y = model(100 * x)
    with torch.no_grad(), te.fp8_autocast(enabled=True, fp8_recipe=RECIPE), fusions.disabled(*OURS):
        assert apart(y, twin(100 * x)) < 0.03
    after = states(model)
    assert all(torch.equal(a, after[key][0]) and torch.equal(b, after[key][1]) for key, (a, b) in before.items())


def test_side_streams() -> None:
    """A model on a stream of its own, while another is at work."""
    model, twin = made("mlp")
    x = data(0, 2048, F)
    wanted = [step(twin, x, RECIPE, k) for k in range(3)]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [step(model, x, RECIPE, k) for k in range(3)]
    torch.cuda.synchronize()
    for ours, theirs in zip(found, wanted, strict=True):
        compare(ours, theirs)


def test_a_model_learns() -> None:
    """As fast as in bfloat16."""
    losses = []
    for enabled in (True, False):
        model, _ = made("mlp", F32)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        target = data(99, F, F, dtype=F32) / 16
        for k in range(100):
            x = data(k, 512, F, dtype=F32)
            with te.fp8_autocast(enabled=enabled, fp8_recipe=RECIPE), torch.autocast("cuda", BF16):
                loss = (model(x).float() - x @ target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.5 and abs(losses[0] / losses[1] - 1.0) < 0.05, losses

"""Regions whose recipes keep nothing: nothing is left behind, and what works with regions works with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser as te
from te_fuser import ops
from te_fuser.config import config
from te_fuser.fuser.steps import function_tasks
from te_fuser.kernels import quantizers
from te_fuser.kernels.cublaslt import products
from te_fuser.quantization import checkpoint_contexts, lowering, microbatch, states
from te_fuser.quantization.rerun import GraphedRegion
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.quantization.regions import assert_same, call
from tests.refused import raises

F, FFN, HEADS = 128, 256, 2
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "blocks": Float8BlockScaling(),
    "mx": MXFP8BlockScaling(),
}
MODELS = {
    "mlp": lambda: te.Sequential(te.Residual(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F))),
    "gate beside": lambda: te.Sequential(ops.Linear(F, FFN), te.Residual(ops.SwiGLU(), ops.Linear(F, FFN))),
    "te.Linear": lambda: te.Linear(F, FFN),
    "te.LayerNormMLP": lambda: te.LayerNormMLP(F, FFN, activation="swiglu", normalization="RMSNorm"),
    "te.TransformerLayer": lambda: te.TransformerLayer(F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0),
}
every = pytest.mark.parametrize("recipe", [*RECIPES.values()], ids=[*RECIPES])


def mlp() -> Any:
    torch.manual_seed(0)
    return MODELS["mlp"]()


def data(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (5, 3, F)), generator=torch.Generator().manual_seed(seed))


@every
@pytest.mark.parametrize(
    ("name", "dtype"), [*((name, torch.float32) for name in MODELS), ("te.LayerNormMLP", torch.bfloat16)]
)
def test_values_and_gradients_are_those_of_the_reference(name: str, dtype: torch.dtype, recipe: Recipe) -> None:
    torch.manual_seed(0)
    model = MODELS[name]().to(dtype)
    x = data().to(dtype)
    y, found = call(model, recipe, x)
    wanted_y, wanted = call(model, recipe, x, model.reference)
    plain, _ = call(model, None, x)
    often, far = (2e-3, 0.03) if dtype == torch.float32 else (0.1, 0.3)
    assert not torch.equal(y, plain)
    for role, right in {"y": wanted_y, **wanted}.items():
        if role.endswith("key_bias"):  # which softmax takes away
            continue
        apart = ((y if role == "y" else found[role]) - right).float()
        size = right.float()
        assert apart.square().mean().sqrt() <= often * size.square().mean().sqrt() + 1e-6, role
        assert apart.abs().max() <= far * size.abs().max() + 1e-6, role


@every
def test_nothing_is_kept_and_calibrating_changes_nothing(recipe: Recipe) -> None:
    model = mlp()
    names = {*model.state_dict()}
    first = call(model, recipe, data())
    assert_same(first, call(model, recipe, data()))
    assert states(model) == {} and {*model.state_dict()} == names and not [*model.buffers()]
    call(model, recipe, 1000.0 * data(1))
    assert_same(first, call(model, recipe, data()))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.load_state_dict(model.state_dict())
        assert_same(first, call(twin, recipe, data()))
    model, x = mlp(), data()
    wanted = model(x)
    with te.fp8_autocast(enabled=False, calibrating=True, fp8_recipe=recipe):
        assert torch.equal(model(x), wanted)
        said = " ".join(str(model.explain(x, details=True)).split())
    assert "calibrating: scales of 0.1.matmul, 0.3.matmul need no earlier calls, and nothing is quantized" in said
    assert states(model) == {}


@every
def test_known_calls_take_the_scales_of_now(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = mlp(), mlp()
    wanted = [call(twin, recipe, 4.0**step * data(step)) for step in range(3)]
    call(model, recipe, data())
    monkeypatch.setattr(model._prepared()[0].fuser, "_prepare", None)
    for step in range(3):
        assert_same(call(model, recipe, 4.0**step * data(step)), wanted[step])


@every
def test_checkpoints_and_micro_batches_have_their_own_values(recipe: Recipe) -> None:
    layer, model = te.LayerNormMLP(F, FFN), mlp()
    of_layer, wanted = (call(m, recipe, data()) for m in (layer, model))
    for first in (True, False):
        assert_same(call(layer, recipe, data(), lambda x, first=first: layer(x, is_first_microbatch=first)), of_layer)
        with microbatch(first):
            assert_same(call(model, recipe, data()), wanted)
    assert_same(call(model, recipe, data(), lambda x: te.checkpoint(model, x)), wanted)
    contexts = {"use_reentrant": False, "context_fn": checkpoint_contexts}
    assert_same(call(model, recipe, data(), lambda x: checkpoint(model, x, **contexts)), wanted)


@pytest.mark.parametrize("recipe", [*RECIPES.values(), DelayedScaling()], ids=str)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_recompute_that_lost_its_region_raises(reentrant: bool, recipe: Recipe) -> None:
    model, x = mlp(), data().requires_grad_()
    with te.autocast(recipe=recipe):
        y = checkpoint(model, x, use_reentrant=reentrant)
    raises(RuntimeError, "without the region that it ran in.*checkpoint_contexts", lambda: y.sum().backward())
    call(model, recipe, data())  # and everything goes on


@every
def test_late_backwards_and_retained_graphs(recipe: Recipe) -> None:
    model, x = mlp(), data().requires_grad_()
    _, wanted = call(model, recipe, x)
    model.zero_grad()
    with te.autocast(recipe=recipe):
        y = model(x)
    for _ in range(2):
        call(model, recipe, 50.0 * data(1))
        model.zero_grad()
        x.grad = None
        y.square().sum().backward(retain_graph=True)
        assert torch.equal(x.grad, wanted["x"])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_backward_that_raises_leaves_no_amax_to_the_next(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error comes behind the pass that finds a gradient's amax, before the step that makes a scale of it."""
    model, x, fails = mlp(), data().requires_grad_(), [False]
    of_torch = quantizers.scale_by_torch

    def scaled(*given: Any, **how: Any) -> Any:
        if fails[0]:
            raise error("in between")
        return of_torch(*given, **how)

    monkeypatch.setattr(quantizers, "scale_by_torch", scaled)
    with te.autocast(recipe=RECIPES["current"]):
        y = model(x)
    fails[0] = True
    raises(error, "in between", y.backward, torch.full_like(y, 1000.0), retain_graph=True)
    fails[0] = False
    found = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    assert torch.equal(found, torch.autograd.grad(y, x, torch.ones_like(y))[0])


def test_what_is_saved_beside_an_amax_outlives_a_backward_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel puts the scale and its reciprocal beside the amax that they follow from: they share its version."""
    model, x, fails = mlp(), data().requires_grad_(), [False]
    of_torch = quantizers.scale_by_torch

    def zeros(count: int, in_kernels: bool, device: torch.device) -> tuple[torch.Tensor, ...]:
        return torch.zeros((count, 4), device=device)[:, 2].unbind()

    def scaled(amax: torch.Tensor, **how: Any) -> tuple[torch.Tensor, ...]:
        if fails[0]:
            raise RuntimeError("in between")
        found = tuple([amax.as_strided((), (), amax.storage_offset() - k) for k in (1, 2)])
        for t, number in zip((*found, amax), (*of_torch(amax.clone(), **how), 0.0), strict=True):
            t.data.copy_(torch.as_tensor(number))
        return found

    monkeypatch.setattr(function_tasks, "_zeros", zeros)
    monkeypatch.setattr(quantizers, "scale_by_torch", scaled)
    with te.autocast(recipe=RECIPES["current"]):
        y = model(x)
    fails[0] = True
    raises(RuntimeError, "in between", y.backward, torch.ones_like(y), retain_graph=True)
    fails[0] = False
    found = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)[0]
    assert torch.equal(found, torch.autograd.grad(y, x, torch.ones_like(y))[0])


@every
@pytest.mark.parametrize("reference", [False, True])
def test_a_module_that_a_list_has_twice_scales_what_each_place_quantizes(reference: bool, recipe: Recipe) -> None:
    torch.manual_seed(0)
    shared, apart = ops.MatMul(F, F), [ops.MatMul(F, F) for _ in range(2)]
    for one in apart:
        one.load_state_dict(shared.state_dict())
    model, wanted = (te.Sequential(a, ops.GELU(), b) for a, b in [(shared, shared), apart])
    x = 1000.0 * data()
    (y, found), (wanted_y, parts) = (call(m, recipe, x, m.reference if reference else None) for m in (model, wanted))
    gradient = parts["0.weight"] + parts["2.weight"]
    assert torch.equal(y, wanted_y) and torch.equal(found["x"], parts["x"])
    torch.testing.assert_close(found["0.weight"], gradient, rtol=1e-5, atol=1e-5 * float(gradient.abs().max()))


@every
def test_references_are_transformed(recipe: Recipe) -> None:
    """A gradient, one of each row by its own scales, and a batch of gradients."""
    model, x = mlp(), data(0, 5, F)
    _, wanted = call(model, recipe, x, model.reference)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return model.reference(x).square().sum()

    with te.autocast(recipe=recipe):
        assert torch.equal(torch.func.grad(loss)(x), wanted["x"])
        rows = torch.func.vmap(torch.func.grad(loss))(x[:, None])
        of_row = torch.func.jacrev(model.reference)(x[:1])
    for row, found in zip(x, rows, strict=True):
        torch.testing.assert_close(found, call(model, recipe, row[None], model.reference)[1]["x"], rtol=1e-3, atol=1e-4)
    with te.autocast(recipe=recipe):
        if recipe.scales == "tensor":
            with pytest.raises(RuntimeError, match=r"transform the forward too, by torch\.func\.jacrev"):
                torch.autograd.functional.jacobian(model.reference, x[:1], vectorize=True)
        else:
            batched = torch.autograd.functional.jacobian(model.reference, x[:1], vectorize=True)
            torch.testing.assert_close(batched, of_row, rtol=1e-3, atol=1e-4)


def test_verified() -> None:
    """Each step by itself too: zeros of one step share their memory, which it does not deny."""
    with te.autocast(recipe=RECIPES["current"]):
        te.verify(te.Sequential(ops.MatMul(32, 32), ops.MatMul(32, 32)), torch.randn(3, 32, requires_grad=True))


@every
def test_recipes_follow_each_other_in_a_region_and_some_products_have_others(recipe: Recipe) -> None:
    """Products of which nothing is kept may run by any in turn; the scales that another one keeps stay."""
    model, twin, delayed = mlp(), mlp(), DelayedScaling(amax_history_len=2)
    for step in range(2):
        call(model, delayed, data(step))
        call(twin, delayed, data(step))
    before, wanted = states(model), call(mlp(), recipe, data(3))
    with te.autocast(recipe=delayed):
        assert_same(call(model, recipe, data(3)), wanted)
        for other in RECIPES.values():
            call(model, other, data(3))
    assert states(model).keys() == before.keys()
    for name, (scale, history) in states(model).items():
        assert torch.equal(scale, before[name][0]) and torch.equal(history, before[name][1]), name
    assert_same(call(model, delayed, data(4)), call(twin, delayed, data(4)))
    model = te.Sequential(ops.Linear(F, F), ops.Linear(F, F), ops.Linear(F, F))
    te.precision(model, {"1": DelayedScaling(amax_history_len=2), "2": None})
    for step in range(3):
        call(model, recipe, data(step))
    assert {*states(model)} == {"1.input", "1.weight", "1.output_gradient"}
    with te.autocast(recipe=recipe):
        said = " ".join(str(model.explain(data(), details=True)).split())
    assert "in 8 bits (E4M3, gradients in E5M2), emulated on cpu: multiplied in float32: 1.matmul" in said
    assert "2.matmul stays in its own precision: te.precision says so" in said


@pytest.mark.parametrize("recipe", [*RECIPES.values(), DelayedScaling()], ids=str)
def test_main_grad(recipe: Recipe) -> None:
    torch.manual_seed(0)
    keywords: Any = {"attention_dropout": 0.0, "attn_mask_type": "causal"}
    plain = te.MultiheadAttention(F, HEADS, **keywords)
    model = te.MultiheadAttention(F, HEADS, fuse_wgrad_accumulation=True, **keywords)
    model.load_state_dict(plain.state_dict())
    for p in model.parameters():
        if p.dim() > 1:
            p.main_grad = torch.full_like(p, 0.5)  # type: ignore[attr-defined]
    _, wanted = call(plain, recipe, data())
    call(model, recipe, data())
    for name, p in model.named_parameters():
        if p.dim() > 1:
            torch.testing.assert_close(p.main_grad, wanted[name] + 0.5, rtol=1e-5, atol=1e-5)


@every
def test_torch_autocast(recipe: Recipe) -> None:
    model, dtype = mlp(), torch.float16 if recipe is RECIPES["current"] else torch.bfloat16
    with torch.autocast("cpu", dtype):
        y, found = call(model, recipe, data())
    wanted, right = call(model, recipe, data())
    assert (y - wanted).float().abs().max() <= 0.1 * wanted.abs().max()
    for name, gradient in right.items():
        assert found[name].dtype == torch.float32
        assert (found[name] - gradient).square().mean() <= 0.03 * gradient.square().mean(), name


@every
def test_what_needs_no_gradient_and_what_is_empty(recipe: Recipe) -> None:
    model, twin = mlp(), mlp()
    _, wanted = call(twin, recipe, data())
    model[0][1].weight.requires_grad_(False)
    y, found = call(model, recipe, data())
    assert found.keys() == wanted.keys() - {"0.1.weight"}
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in found.items())
    with torch.no_grad(), te.autocast(recipe=recipe):
        assert torch.equal(model.eval()(data()), y)
    y, found = call(model.train(), recipe, data(0, 0, 3, F))
    assert y.shape == (0, 3, F) and all(not gradient.any() for gradient in found.values())


@every
def test_features_that_are_no_whole_blocks_stay_in_their_own_precision(recipe: Recipe) -> None:
    model = te.Sequential(ops.Linear(48, F), ops.GELU(), ops.Linear(F, F))
    with te.autocast(recipe=recipe):
        said = " ".join(str(model.explain(data(0, 3, 48), details=True)).split())
    if recipe.step > 16:
        assert f"0.matmul stays in its own precision: its in_features, 48, are no multiple of {recipe.step}" in said
    assert {"current": "scales of now", "blocks": "128 x 128 of a weight", "mx": "1 x 32"}[
        next(name for name, r in RECIPES.items() if r == recipe)
    ] in said
    for rows in (1, 7, 129):
        call(model, recipe, data(rows, rows, 48))


@every
def test_graphs_run_in_the_region_that_they_were_captured_in(recipe: Recipe) -> None:
    model, x, replayed = mlp(), data(), []
    with te.autocast(recipe=recipe):
        graph = GraphedRegion(model, torch.device("cpu"))
        with graph.forward():
            model(x)
        graph.run(replayed.append, x)
    for other in (None, DelayedScaling()):
        with te.autocast(enabled=other is not None, recipe=other), pytest.raises(ValueError, match="this graph was"):
            graph.run(replayed.append, x)
    with te.autocast(recipe=recipe):
        graph.run(replayed.append, x)
    assert len(replayed) == 2


# ------------------------------------------------------------------------------------------------ machines

MACHINES = {
    ("current", (8, 0), 130000): "compute capability 8.9, this GPU has 8.0",
    ("current", (8, 9), 120000): None,
    ("blocks", (9, 0), 120900): None,
    ("blocks", (9, 0), 120803): "take cuBLAS 12.9, this PyTorch has 12.8",
    ("blocks", (8, 9), 130000): "take compute capability 9.0, this GPU has 8.9",
    ("blocks", (10, 0), 130000): "take compute capability 9.0, this GPU has 10.0",
    ("mx", (10, 0), 130000): "each 32 numbers are emulated alone",
    ("mx", (9, 0), 130000): "each 32 numbers are emulated alone",
}


@pytest.mark.parametrize("case", MACHINES, ids=str)
def test_machines(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (name, capability, version), words = case, MACHINES[case]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    monkeypatch.setattr(products, "obstacle", lambda: None)
    monkeypatch.setattr(products, "version", lambda: version)
    device, kind = torch.device("cuda"), RECIPES[name].scales
    if words is None:
        products.check_machine(device, kind)
        return
    raises(RuntimeError, words, products.check_machine, device, kind)
    monkeypatch.setattr(config, "emulate_fp8", True)
    products.check_machine(device, kind)


def test_machines_are_asked_of_each_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(lowering, "check_machine", lambda device, scales: asked.append(scales))
    model = te.Sequential(*(ops.Linear(F, F) for _ in range(4)))
    te.precision(model, {str(k): recipe for k, recipe in enumerate(RECIPES.values())})
    with te.autocast():
        model(data())
    assert sorted(asked) == ["block", "mx", "tensor"]

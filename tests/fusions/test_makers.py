"""What calls make of parameters before their first step: weights in 8 bits, on a GPU that a CPU stands for."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fusions import float8_weights
from te_fuser.quantization import product_scaling, states
from te_fuser.recipe import DelayedScaling
from tests.fake_cuda import FakeDriver
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_an_emulated_gpu")]

F, FFN = 32, 64
RECIPE = DelayedScaling(amax_history_len=3)
PRODUCTS = ("float8_matmul", "float8_matmul_bias", "float8_matmul_backward", "float8_matmul_main_grad")


def mlp(**how: Any) -> te.Sequential:
    torch.manual_seed(0)
    parts = ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F)
    return te.Sequential(te.Residual(*parts), **how)


def data(seed: int, rows: int = 24) -> torch.Tensor:
    return torch.randn(rows, F, generator=torch.Generator().manual_seed(seed))


def step(model: Any, seed: int, first: bool | None = None) -> dict[str, torch.Tensor]:
    """Output and gradients of one call in a region."""
    x = data(seed).requires_grad_()
    with te.autocast(recipe=RECIPE), te.quantization.microbatch(first):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, [x, *parameters], torch.cos(y.detach()))
    return {"output": y.detach(), **dict(zip(("x", *names), gradients, strict=True))}


def compare(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], close: float = 0.02) -> None:
    for name, exact in wanted.items():
        apart = (found[name] - exact).double().square().mean().sqrt() / exact.double().square().mean().sqrt()
        assert apart <= close, (name, apart)


def test_as_emulated(driver: FakeDriver) -> None:
    """In values, gradients and scales, over some steps; all weights take one launch more than kept ones do."""
    model, twin = mlp(), mlp()
    for seed in range(3):
        found = step(model, seed)
        with fusions.disabled(*PRODUCTS):
            compare(found, step(twin, seed))
    for (scale, history), other in zip(states(model).values(), states(twin).values(), strict=True):
        torch.testing.assert_close(scale, other[0], rtol=0.05, atol=0.0)
        torch.testing.assert_close(history, other[1], rtol=0.05, atol=0.0)
    counts = []
    for first in (None, True, False):
        step(model, 3, first)
        driver.launches = 0
        step(model, 3, first)
        counts.append(driver.launches)
    assert counts[0] == counts[2] + 1


def test_micro_batches_are_bit_for_bit_as_weights_made_anew() -> None:
    model = mlp()
    step(model, 0)
    twin = copy.deepcopy(model)
    for seed, first in enumerate((True, False, False, True)):
        compare(step(model, seed, first), step(twin, seed), 0.0)


def test_what_a_call_makes_is_its_own() -> None:
    """Late backwards, graphs that are kept, and weights that have changed by then, by .data or as optimizers do."""
    model = mlp()
    step(model, 0)
    twin, parameter = copy.deepcopy(model), next(model.parameters())
    with te.autocast(recipe=RECIPE):
        ys = [model(data(k)) for k in (1, 2)]
    with te.autocast(recipe=RECIPE):
        zs = [twin(data(k)) for k in (1, 2)]
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.data.mul_(-1.0)
    with te.autocast(recipe=RECIPE):
        model(data(3))
    other = next(twin.parameters())
    for y, z in zip(reversed(ys), reversed(zs), strict=True):
        for _ in range(2):
            found, wanted = (
                torch.autograd.grad(t.square().sum(), p, retain_graph=True)[0] for t, p in ((y, parameter), (z, other))
            )
            assert torch.equal(found, wanted)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[weakref.ref[torch.Tensor]]]:
    """Of each call what it made of weights."""
    made: list[list[weakref.ref[torch.Tensor]]] = []
    maker = float8_weights.Weights8
    function = maker.function

    def noting(self: Any, wanted: Any, device: Any) -> Any:
        run = function(self, wanted, device)

        def noted(*given: torch.Tensor) -> Any:
            found = run(*given)
            made.append([weakref.ref(t) for t in found])
            return found

        return noted

    monkeypatch.setattr(maker, "function", noting)
    return made


def alive(refs: list[weakref.ref[torch.Tensor]]) -> int:
    gc.collect()
    return sum(ref() is not None for ref in refs)


def test_what_is_made_is_freed_with_its_call(seen: list[list[weakref.ref[torch.Tensor]]]) -> None:
    """W dies with forward and W^T with backward; a call without gradients turns no weight."""
    model = mlp()
    for grad, count in ((True, 4), (False, 2)):
        with te.autocast(recipe=RECIPE), torch.set_grad_enabled(grad):
            y = model(data(0))
        assert len(seen[-1]) == count and alive(seen[-1]) == (2 if grad else 0)
        if grad:
            y.sum().backward()
            assert alive(seen[-1]) == 0


def test_what_runs_again_makes_it_again() -> None:
    model = mlp()
    step(model, 0)
    twin = copy.deepcopy(model)
    x, y = data(1).requires_grad_(), data(1).requires_grad_()
    with te.autocast(recipe=RECIPE):
        found = te.checkpoint(model, x)
    with te.autocast(recipe=RECIPE):
        wanted = twin(y)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        pass  # scales move in between
    for t in (found, wanted):
        t.square().sum().backward()
    assert torch.equal(found, wanted) and torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def joined() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(F, 3 * FFN, parameters_split=("query", "key", "value"))


@pytest.mark.parametrize("make", [mlp, joined])
def test_weights_that_are_taken_away_are_turned_again(
    make: Any, driver: FakeDriver, monkeypatch: pytest.MonkeyPatch, seen: list[list[weakref.ref[torch.Tensor]]]
) -> None:
    """So that nothing of them is kept, as `fully_shard` wants it: bit for bit the same, by a launch for each."""
    model, twin = make(), make()
    if make is joined:
        for m in (model, twin):  # apart from each other, so that each call copies them
            for p in m.parameters():
                p.data = p.data.clone()
    for seed in range(2):
        launches = []
        wanted = step(twin, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(product_scaling, "is_taken_away", lambda owner: True)
            found = step(model, seed)
        for name, exact in wanted.items():
            assert torch.equal(found[name], exact), name
    for m in (model, twin):
        x = data(3).requires_grad_()
        with te.autocast(recipe=RECIPE):
            y = m(x)
        launches.append(alive(seen[-1]))
        driver.launches = 0
        y.sum().backward()
        launches.append(driver.launches)
    count = len(seen[-1]) // 2
    assert launches[0] == 0 and launches[2] == count and launches[1] == launches[3] + count


def test_fully_shard_marks_what_it_takes_away() -> None:
    """By hooks for loading, which other modules have from others."""
    model = mlp()
    model.register_load_state_dict_post_hook(lambda *_: None)
    assert not product_scaling.is_taken_away(model)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        fully_shard(model[0][1], mesh=init_device_mesh("cpu", (1,)))
        assert product_scaling.is_taken_away(model[0][1]) and not product_scaling.is_taken_away(model[0][3])
    finally:
        torch.distributed.destroy_process_group()


def test_what_each_call_makes_is_no_activation() -> None:
    """Plans say it apart, and by one step for all."""
    with te.autocast(recipe=RECIPE):
        plan, text = mlp().plan(data(0)), " ".join(str(mlp().explain(data(0))).split())
    assert plan.kept_bytes("tensor") == 2 * F * FFN and [s.name for s in plan.before] == ["quantize_weights"]
    assert "2 tensors that each call makes of parameters" in text
    assert "before quantize_weights" in text and "made parameter" not in text


def test_other_parameters_of_nothing() -> None:
    """A list with products of both kinds, shared weights, and none that needs a gradient."""
    shared = ops.MatMul(F, F)
    model = te.Sequential(shared, ops.GELU(), shared, ops.MatMul(F, 24), ops.MatMul(24, F))
    twin = copy.deepcopy(model)
    for seed in range(2):
        found = step(model, seed)
        with fusions.disabled(*PRODUCTS):
            compare(found, step(twin, seed))
    with te.autocast(recipe=RECIPE):
        (made,) = model.plan(data(0).requires_grad_()).before
    assert len(made.outputs) == 2  # one weight, in two layouts


@pytest.mark.parametrize("way", ["verify", "measure"])
def test_who_looks_at_steps(way: str) -> None:
    model = mlp(verify=way == "verify")
    if way == "verify":
        step(model, 0)
        return
    with te.autocast(recipe=RECIPE):
        assert "quantize_weights" in str(model.explain(data(0), measure=True))


@pytest.mark.parametrize("grad", [True, False])
@fusions.disabled(*[name for name in fusions.names() if "quack" in name])  # which ask the GPU at hand
def test_nothing_of_pythons_is_between_a_plan_and_its_products(grad: bool) -> None:
    """Behind the first call; cuBLASLt's run in the native loop."""
    model, called = mlp().to(torch.bfloat16), []
    x = data(0).to(torch.bfloat16)

    def run() -> None:
        with te.autocast(recipe=RECIPE), torch.set_grad_enabled(grad):
            y = model(x)
        if grad:
            y.sum().backward()

    for _ in range(3):
        run()
    sys.setprofile(lambda frame, event, argument: called.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(None)
    assert called and not [path for path in called if "te_fuser/fusions" in path and "registry" not in path]
    with te.autocast(recipe=RECIPE):
        products = [s.task for s in model.plan(x).steps if s.name.startswith("float8_matmul")]
    assert len(products) == 6 and {task.call for task in products} == {"product"}

"""Weights by scales of their own, and models whose products read them, on a GPU that a CPU stands for."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.distributed.dtensor import is_dtensor, own_part
from te_fuser.fuser.plan import planner
from te_fuser.quantization import microbatch, product_scaling
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams, Recipe
from tests.fake_cuda import FakeDriver
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_an_emulated_gpu")]

F, FFN = 32, 64
POWERS = QParams(power_2_scale=True, amax_epsilon=1e-3)
RECIPES: dict[str, Recipe] = {
    "current": Float8CurrentScaling(),
    "powers": Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_weight=POWERS, fp8_quant_bwd_grad=POWERS),
}
PRODUCTS = ("float8_matmul", "float8_matmul_bias", "float8_matmul_backward", "float8_matmul_main_grad")
every = pytest.mark.parametrize("recipe", [*RECIPES.values()], ids=[*RECIPES])


def mlp() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(te.Residual(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F)))


def joined() -> te.Linear:
    torch.manual_seed(0)
    made = te.Linear(F, 3 * FFN, parameters_split=("query", "key", "value"))
    for p in made.parameters():  # apart from each other, so that each call copies them
        p.data = p.data.clone()
    return made


def step(
    model: Any,
    recipe: Recipe,
    rows: int = 24,
    scale: float = 1.0,
    twice: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Output and gradients of one call in a region."""
    x = (scale * torch.randn(rows, F, generator=torch.Generator().manual_seed(rows))).to(dtype).requires_grad_()
    with te.autocast(recipe=recipe):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    for k in range(1 + twice):
        kept = torch.autograd.grad(y, [x, *parameters], (k + 1.0) * torch.cos(y.detach()), retain_graph=twice)
    return {"output": y.detach(), **dict(zip(("x", *names), kept, strict=True))}


@every
def test_as_emulated(recipe: Recipe) -> None:
    """In values and gradients, whatever their size, of any number of tokens."""
    model, twin = mlp(), mlp()
    for rows, scale in ((24, 1.0), (24, 1e3), (7, 1e-3), (1, 1.0)):
        found = step(model, recipe, rows, scale)
        with fusions.disabled(*PRODUCTS):
            wanted = step(twin, recipe, rows, scale)
        for name, exact in wanted.items():
            apart = (found[name] - exact).double().norm() / exact.double().norm()
            assert apart <= 0.02, (name, rows, apart)


@every
def test_a_graph_that_is_kept_measures_anew(recipe: Recipe) -> None:
    """Each of its backwards has the scales of its own gradients: here all are powers of two apart."""
    once, again = step(mlp(), recipe), step(mlp(), recipe, twice=True)
    for name, gradient in once.items():
        torch.testing.assert_close(again[name], gradient * (1.0 if name == "output" else 2.0), rtol=1e-6, atol=1e-7)


@every
def test_what_a_kernel_stores_it_also_measures(recipe: Recipe, driver: FakeDriver) -> None:
    """Rounded as it is stored: bit for bit what passes of their own would find, and a launch less for each."""

    def gradients() -> tuple[dict[str, torch.Tensor], int]:
        model = te.Sequential(mlp(), mlp(), mlp()).to(torch.bfloat16)
        driver.launches = 0
        return step(model, recipe, dtype=torch.bfloat16), driver.launches

    found, launches = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "with_raised", lambda plan, prices: plan)
        wanted, more = gradients()
    assert more - launches == 2  # the gradients that two blocks get from those behind them
    for name, exact in wanted.items():
        assert torch.equal(found[name], exact), name


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=2), *RECIPES.values()], ids=["delayed", *RECIPES])
@pytest.mark.parametrize("first", [None, True])
@pytest.mark.parametrize("taken_away", [False, True])
def test_weights_that_are_dtensors(
    recipe: Recipe, first: bool | None, taken_away: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each this rank's part is quantized; gradients are DTensors, too."""
    monkeypatch.setattr(product_scaling, "is_taken_away", lambda owner: taken_away)
    model, twin = te.parallelize(mlp(), mesh), mlp()
    for rows in (24, 24, 7):
        with microbatch(first):
            found, wanted = step(model, recipe, rows), step(twin, recipe, rows)
        for name, exact in wanted.items():
            assert torch.equal(own_part(found[name]), exact), (name, rows)
    assert all(is_dtensor(p) and is_dtensor(found[name]) for name, p in model.named_parameters())


@every
@pytest.mark.parametrize("make", [mlp, joined])
def test_weights_that_are_taken_away_are_turned_again(make: Any, recipe: Recipe) -> None:
    wanted = step(make(), recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_scaling, "is_taken_away", lambda owner: True)
        found = step(make(), recipe)
    for name, exact in wanted.items():
        assert torch.equal(found[name], exact), name


def test_verified() -> None:
    """Numbers of one step share their memory, which it does not deny."""
    with te.autocast(recipe=RECIPES["current"]):
        te.verify(te.Sequential(ops.MatMul(F, F), ops.MatMul(F, F)), torch.randn(16, F, requires_grad=True))


def test_launches(driver: FakeDriver) -> None:
    """Of weights two for all; of what each product quantizes a pass and the kernel; one behind them."""
    model, recipe = mlp(), RECIPES["current"]
    step(model, recipe)
    driver.launches = 0
    with te.autocast(recipe=recipe), torch.no_grad():
        model(torch.randn(24, F))
        model(torch.randn(24, F))
    assert driver.launches / 2 == 2 + 2 * 2 + 1


_OF_CALLS = ("/te_fuser/fuser/", "/te_fuser/fusions/", "/te_fuser/kernels/own_")


def calls_of(model: te.Sequential, recipe: Recipe) -> int:
    """How many functions a forward and a backward enter that are like the ones before, entry of the region apart."""
    x, found = torch.randn(16, F, requires_grad=True), 0

    def count(frame: Any, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and any(folder in frame.f_code.co_filename for folder in _OF_CALLS)

    def run() -> None:
        with te.autocast(recipe=recipe):
            y = model(x)
        y.backward(torch.ones_like(y))

    for _ in range(3):
        run()
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def test_scales_of_now_take_the_host_few_functions_more_than_kept_ones() -> None:
    """Of whatever length the list is."""
    for model in (mlp, lambda: te.Sequential(mlp(), mlp(), mlp())):
        assert calls_of(model(), RECIPES["current"]) - calls_of(model(), DelayedScaling()) <= 8

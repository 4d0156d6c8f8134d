"""Models in regions of FP8 on a GPU that a CPU stands for: as emulated; what calls make of weights, when, how often."""

from __future__ import annotations

import copy
import gc
import itertools
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.distributed.dtensor import is_dtensor, own_part
from te_fuser.fuser import pipeline
from te_fuser.fusions import float8_weights
from te_fuser.quantization import lowering, states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Format, QParams, Recipe
from tests.fake_cuda import FakeDriver
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.regions import FFN, PRODUCTS, F, data, joined, mlp, near, states_near, step
from tests.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_an_emulated_gpu")]

BF16 = torch.bfloat16
DELAYED, CURRENT = DelayedScaling(amax_history_len=3), Float8CurrentScaling()
POWERS = QParams(power_2_scale=True, amax_epsilon=1e-3)
BY_POWERS = Float8CurrentScaling(fp8_format=Format.E4M3, fp8_quant_fwd_weight=POWERS, fp8_quant_bwd_grad=POWERS)
ALL: dict[str, Recipe] = {"delayed": DELAYED, "current": CURRENT, "powers": BY_POWERS}
every = pytest.mark.parametrize("recipe", [*ALL.values()], ids=[*ALL])
own = pytest.mark.parametrize("recipe", [CURRENT, BY_POWERS], ids=["current", "powers"])  # scales of each call
PARTLY = ("partly_float8_mat_mul", "partly_float8_mat_mul_backward")
SOME = [kept for kept in itertools.product((False, True), repeat=3) if any(kept) and not all(kept)]


# ----------------------------------------------------------------------------------------------------- as emulated


@every
def test_model_over_some_steps_is_as_emulated(recipe: Recipe) -> None:
    """In values, gradients and states, whatever their size, of any number of tokens."""
    model, twin = mlp(residual=True), mlp(residual=True)
    sizes = [(24, 1.0)] * 3 if recipe is DELAYED else [(24, 1.0), (24, 1e3), (7, 1e-3), (1, 1.0)]
    for seed, (rows, scale) in enumerate(sizes):
        x = scale * data(seed, rows)
        found = step(model, recipe, seed, x)
        with fusions.disabled(*PRODUCTS):
            near(found, step(twin, recipe, seed, x))
    states_near(states(model), states(twin), 0.05)


@pytest.mark.parametrize(("kept", "form"), [*zip(SOME, 3 * (Format.HYBRID, Format.E4M3), strict=True)])
def test_model_of_partly_8_bits_is_as_emulated(kept: tuple[bool, bool, bool], form: Format) -> None:
    model, twin = mlp(), mlp()
    recipe = DelayedScaling(override_linear_precision=kept, amax_history_len=3, fp8_format=form)
    for seed in range(3):
        found = step(model, recipe, seed)
        with fusions.disabled(*PARTLY):
            near(found, step(twin, recipe, seed))
    with te.autocast(recipe=recipe):
        names = [s.name for s in model.plan(data(0).requires_grad_()).steps]
    assert [names.count(name) for name in PARTLY] == [2, 4]
    states_near(states(model), states(twin), 0.02)


def test_model_of_both_products_and_shared_weights_is_as_emulated() -> None:
    shared = ops.MatMul(F, F)
    model = te.Sequential(shared, ops.GELU(), shared, ops.MatMul(F, 24), ops.MatMul(24, F))
    twin = copy.deepcopy(model)
    for seed in range(2):
        found = step(model, DELAYED, seed)
        with fusions.disabled(*PRODUCTS):
            near(found, step(twin, DELAYED, seed))
    with te.autocast(recipe=DELAYED):
        (made,) = model.plan(data(0).requires_grad_()).before
    assert len(made.outputs) == 2  # one weight, in two layouts


def test_model_verified_passes_though_numbers_of_a_step_share_memory(few_rows: None) -> None:
    with te.autocast(recipe=CURRENT):
        te.verify(te.Sequential(ops.MatMul(F, F), ops.MatMul(F, F)), torch.randn(16, F, requires_grad=True))
    step(mlp(residual=True, verify=True), DELAYED, 0)
    with te.autocast(recipe=DELAYED):
        assert "quantize_weights" in str(mlp().explain(data(0), measure=True, details=True))


# ------------------------------------------------------------------------------------------ when weights are made


def test_micro_batches_are_bit_for_bit_as_weights_made_anew(driver: FakeDriver) -> None:
    """All weights take one launch more than kept ones do."""
    model = mlp(residual=True)
    step(model, DELAYED, 0)
    twin = copy.deepcopy(model)
    for seed, first in enumerate((True, False, False, True)):
        near(step(model, DELAYED, seed, first=first), step(twin, DELAYED, seed), 0.0)
    counts = []
    for first in (None, True, False):
        step(model, DELAYED, 3, first=first)
        driver.launches = 0
        step(model, DELAYED, 3, first=first)
        counts.append(driver.launches)
    assert counts[0] == counts[2] + 1


@own
def test_graph_that_is_kept_measures_each_backward_anew(recipe: Recipe) -> None:
    """Each has the scales of its own gradients: here all are powers of two apart."""
    once, again = step(mlp(True), recipe, 0), step(mlp(True), recipe, 0, backwards=2)
    for name, gradient in once.items():
        torch.testing.assert_close(again[name], gradient * (1.0 if name == "output" else 2.0), rtol=1e-6, atol=1e-7)


@own
def test_what_a_kernel_stores_it_also_measures(recipe: Recipe, driver: FakeDriver) -> None:
    """Rounded as it is stored: bit for bit what passes of their own would find, and a launch less for each."""

    def gradients() -> tuple[dict[str, torch.Tensor], int]:
        model = te.Sequential(mlp(True), mlp(True), mlp(True)).to(BF16)
        driver.launches = 0
        return step(model, recipe, 0, data(0, 24), dtype=BF16), driver.launches

    found, launches = gradients()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(pipeline.PLAN_PASSES, "raise amaxes", lambda plan, prices: plan)
        wanted, more = gradients()
    assert more - launches == 2  # the gradients that two blocks get from those behind them
    near(found, wanted, 0.0)


def test_what_a_call_makes_is_its_own() -> None:
    """Late backwards, graphs that are kept, and weights that have changed by then, by .data or as optimizers do."""
    model = mlp(True)
    step(model, DELAYED, 0)
    twin, parameter = copy.deepcopy(model), next(model.parameters())
    with te.autocast(recipe=DELAYED):
        ys = [model(data(k)) for k in (1, 2)]
    with te.autocast(recipe=DELAYED):
        zs = [twin(data(k)) for k in (1, 2)]
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.data.mul_(-1.0)
    with te.autocast(recipe=DELAYED):
        model(data(3))
    other = next(twin.parameters())
    for y, z in zip(reversed(ys), reversed(zs), strict=True):
        for _ in range(2):
            found, wanted = (
                torch.autograd.grad(t.square().sum(), p, retain_graph=True)[0] for t, p in ((y, parameter), (z, other))
            )
            assert torch.equal(found, wanted)


def test_what_runs_again_makes_it_again() -> None:
    model = mlp(True)
    step(model, DELAYED, 0)
    twin = copy.deepcopy(model)
    x, y = data(1).requires_grad_(), data(1).requires_grad_()
    with te.autocast(recipe=DELAYED):
        found = te.checkpoint(model, x)
    with te.autocast(recipe=DELAYED):
        wanted = twin(y)
    with te.autocast(recipe=DELAYED), torch.no_grad():
        pass  # scales move in between
    for t in (found, wanted):
        t.square().sum().backward()
    assert torch.equal(found, wanted) and torch.equal(x.grad, y.grad)  # type: ignore[arg-type]


def test_plan_says_that_what_each_call_makes_is_no_activation() -> None:
    with te.autocast(recipe=DELAYED):
        plan, text = mlp(True).plan(data(0)), " ".join(str(mlp(True).explain(data(0), details=True)).split())
    assert plan.kept_bytes("tensor") == 2 * F * FFN and [s.name for s in plan.before] == ["quantize_weights"]
    assert "2 tensors that each call makes of parameters" in text
    assert "before quantize_weights" in text and "made parameter" not in text


# --------------------------------------------------------------------------------------------- how long they live


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
    model = mlp(True)
    for grad, count in ((True, 4), (False, 2)):
        with te.autocast(recipe=DELAYED), torch.set_grad_enabled(grad):
            y = model(data(0))
        assert len(seen[-1]) == count and alive(seen[-1]) == (2 if grad else 0)
        if grad:
            y.sum().backward()
            assert alive(seen[-1]) == 0


@pytest.mark.parametrize(("make", "recipe"), [(mlp, DELAYED), (mlp, BY_POWERS), (joined, DELAYED), (joined, CURRENT)])
def test_weights_that_are_taken_away_are_turned_again(
    make: Any, recipe: Recipe, driver: FakeDriver, seen: list[list[weakref.ref[torch.Tensor]]]
) -> None:
    """So that nothing of them is kept, as `fully_shard` wants it: bit for bit the same, by a launch for each."""
    model, twin = make(), make()
    for seed in range(2):
        wanted = step(twin, recipe, seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lowering, "is_taken_away", lambda owner: True)
            near(step(model, recipe, seed), wanted, 0.0)
    if recipe is not DELAYED:
        return
    launches = []
    for m in (model, twin):
        with te.autocast(recipe=recipe):
            y = m(data(3).requires_grad_())
        launches.append(alive(seen[-1]))
        driver.launches = 0
        y.sum().backward()
        launches.append(driver.launches)
    count = len(seen[-1]) // 2
    assert launches[0] == 0 and launches[2] == count and launches[1] == launches[3] + count


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_fully_shard_marks_what_it_takes_away(mesh: DeviceMesh) -> None:
    """By hooks for loading, which other modules have from others."""
    model = mlp(True)
    model.register_load_state_dict_post_hook(lambda *_: None)
    assert not lowering.is_taken_away(model)
    fully_shard(model[0][1], mesh=mesh)
    assert lowering.is_taken_away(model[0][1]) and not lowering.is_taken_away(model[0][3])


@pytest.mark.parametrize(
    ("recipe", "first", "taken_away"),
    [(DELAYED, None, True), (DELAYED, True, False), (CURRENT, None, False), (CURRENT, True, True)]
    + [(BY_POWERS, None, True), (BY_POWERS, True, False)],
)
def test_weights_that_are_dtensors_are_quantized_by_their_part(
    recipe: Recipe, first: bool | None, taken_away: bool, mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients are DTensors, too."""
    monkeypatch.setattr(lowering, "is_taken_away", lambda owner: taken_away)
    model, twin = te.parallelize(mlp(True), mesh), mlp(True)
    for rows in (24, 24, 7):
        found, wanted = (step(m, recipe, rows, data(rows, rows), first) for m in (model, twin))
        near({name: own_part(t) for name, t in found.items()}, wanted, 0.0)
    assert all(is_dtensor(p) and is_dtensor(found[name]) for name, p in model.named_parameters())


# ------------------------------------------------------------------------------------------- what the host does


def test_launches_are_two_for_all_weights_and_two_for_each_product(driver: FakeDriver) -> None:
    """Of what each product quantizes a pass and the kernel; one behind them."""
    model = mlp(True)
    step(model, CURRENT, 0)
    driver.launches = 0
    with te.autocast(recipe=CURRENT), torch.no_grad():
        model(data(0))
        model(data(0))
    assert driver.launches / 2 == 2 + 2 * 2 + 1


def entered(model: Any, recipe: Recipe, x: torch.Tensor, backward: bool = True) -> list[str]:
    """The files of the functions that a call enters that is like some before, and its backward."""
    found: list[str] = []

    def run() -> None:
        with te.autocast(recipe=recipe), torch.set_grad_enabled(backward):
            y = model(x)
        if backward:
            y.backward(torch.ones_like(y))

    for _ in range(3):
        run()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_filename) if event == "call" else None)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found


def test_scales_of_now_take_the_host_few_functions_more_than_kept_ones() -> None:
    """Of whatever length the list is; entry of the region apart."""
    rooms = ("/te_fuser/fuser/", "/te_fuser/fusions/", "/te_fuser/kernels/own_")
    x = torch.randn(16, F, requires_grad=True)
    for make in (lambda: mlp(True), lambda: te.Sequential(mlp(True), mlp(True), mlp(True))):
        now, kept = (
            sum(any(room in path for room in rooms) for path in entered(make(), recipe, x))
            for recipe in (CURRENT, DelayedScaling())
        )
        assert now - kept <= 8


@pytest.mark.parametrize("grad", [True, False])
@fusions.disabled(*[name for name in fusions.names() if "quack" in name])  # which ask the GPU at hand
def test_nothing_of_pythons_is_between_a_plan_and_its_products(grad: bool) -> None:
    """Behind the first call; cuBLASLt's run in the native loop."""
    model, x = mlp(True, BF16), data(0, 24).to(BF16)
    called = entered(model, DELAYED, x, grad)
    assert called and not [path for path in called if "te_fuser/fusions" in path and "registry" not in path]
    with te.autocast(recipe=DELAYED):
        products = [s.task for s in model.plan(x).steps if s.name.startswith("float8_matmul")]
    assert len(products) == 6 and {task.call for task in products} == {"product"}

"""Checkpointing in regions: the same regions, the same scales, amaxes once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import checkpoint_contexts, states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe
from tests.quantization.folded import RECIPE, same, step
from tests.refused import raises
from tests.threads import in_threads

WAYS: dict[str, Callable[..., Any]] = {
    "te": te.checkpoint,
    "torch": lambda f, *args: checkpoint(f, *args, use_reentrant=False, context_fn=checkpoint_contexts),
    "tracker": lambda f, *args: te.checkpoint(f, *args, get_rng_state_tracker=te.CudaRNGStatesTracker),
}


def model() -> te.Sequential:
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16))


def plainly(f: Any, x: torch.Tensor) -> torch.Tensor:
    return f(x)


def results(y: torch.Tensor, x: torch.Tensor, m: Any) -> list[torch.Tensor]:
    """y, and the gradients of x and all parameters."""
    return [y, *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])]


def numbers(m: Any) -> list[torch.Tensor]:
    return [t for pair in states(m).values() for t in pair]


def in_steps(run: Any, m: Any, x: torch.Tensor, inside: bool) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for _ in range(3):
        with te.autocast(recipe=RECIPE):
            y = run(m, x)
            found = results(y, x, m) if inside else []
        found = found or results(y, x, m)
    return found


def late(run: Any, m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """With the scales of then."""
    step(m, x)
    with te.autocast(recipe=RECIPE):
        y = run(m, x)
    for k in range(3):
        step(m, (k + 2) * x)
    found = results(y, x, m)
    step(m, x)
    return found


def with_a_region_inside(run: Any, m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The region folds when it runs first, and not again."""

    def inside(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return m(x)

    return [t for _ in range(3) for t in results(run(inside, x), x, m)]


def partly_in_own_precision(run: Any, m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    def part(x: torch.Tensor) -> torch.Tensor:
        y = m[1](m[0](x))
        with te.autocast(enabled=False):
            return m[3](m[2](y))

    with te.autocast(recipe=RECIPE):
        step(m, x)
        y = run(part, x)
    return results(y, x, m)


def one_inside_of_another(run: Any, m: Any, x: torch.Tensor) -> list[torch.Tensor]:
    step(m, x)
    given = (30 * x).detach().requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = run(lambda t: run(m, t), given)
    with te.autocast(recipe=RECIPE):
        pass
    return results(y, given, m)


USES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "backward inside": lambda *given: in_steps(*given, inside=True),
    "backward outside": lambda *given: in_steps(*given, inside=False),
    "late": late,
    "a region inside": with_a_region_inside,
    "partly in own precision": partly_in_own_precision,
    "one inside of another": one_inside_of_another,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_function(way: str, use: str) -> None:
    """Bit for bit, and in the histories and scales behind it."""
    found = []
    for run in (plainly, WAYS[way]):
        torch.manual_seed(1)
        m, x = model(), torch.randn(8, 16, requires_grad=True)
        found.append([*USES[use](run, m, x), *numbers(m)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def _in(recipe: Recipe, run: Callable[[], Any]) -> Any:
    with te.autocast(recipe=recipe):
        return run()


ANOTHER: dict[str, tuple[Recipe | None, Recipe]] = {  # in which forward ran, and what is around backward
    "entered anew": (RECIPE, RECIPE),
    "of now, by another recipe": (Float8CurrentScaling(), Float8BlockScaling()),
    "of now, after kept scales": (RECIPE, Float8CurrentScaling()),
    "kept scales, after those of now": (Float8CurrentScaling(), RECIPE),
    "after none": (None, RECIPE),
    "of now, after none": (None, Float8CurrentScaling()),
}


@pytest.mark.parametrize(("reentrant", "warm"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("case", ANOTHER)
def test_a_recompute_in_another_region_raises(reentrant: bool, case: str, warm: bool) -> None:
    """Also where its plan is the last call's, whose facts alone are looked at."""
    then, around = ANOTHER[case]
    torch.manual_seed(0)
    m, x = te.Sequential(ops.Linear(128, 128)), torch.randn(8, 128, requires_grad=True)
    for recipe in (then, around) if warm and then is not None else ():
        _in(recipe, lambda: m(x).sum().backward())
    y = (lambda f: f() if then is None else _in(then, f))(lambda: checkpoint(m, x, use_reentrant=reentrant))
    words = "in another region than it ran in.*checkpoint_contexts.*te_fuser.checkpoint"
    raises(RuntimeError, words, _in, around, lambda: y.sum().backward())
    _in(around, lambda: m(x).sum().backward())  # and everything goes on


@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()])
@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_with_backward_in_the_same_region(reentrant: bool, recipe: Recipe) -> None:
    found = []
    for run in (plainly, lambda f, *args: checkpoint(f, *args, use_reentrant=reentrant)):
        m, x = model(), torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for _ in range(3):
            m.zero_grad()
            _in(recipe, lambda m=m, x=x, run=run: te.checkpoint(m, run(m, x)).square().sum().backward())
        found.append([x.grad, *[p.grad for p in m.parameters()], *numbers(m)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()])
def test_what_a_hook_of_a_backward_evaluates_is_no_recompute(recipe: Recipe) -> None:
    m, x, seen = model(), torch.randn(8, 16, requires_grad=True), []
    y = x * 2
    y.register_hook(lambda dy: seen.append(m(dy)))
    _in(recipe, lambda: y.sum().backward())
    y = x * 2
    y.register_hook(lambda dy: seen.append(m(dy)))
    y.sum().backward()
    assert len(seen) == 2 and not torch.equal(*seen)


def test_a_region_inside_of_a_recompute_of_torchs_raises() -> None:
    m, x = model(), torch.randn(8, 16, requires_grad=True)

    def inside(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return m(x)

    with pytest.raises(RuntimeError, match="entered inside of a backward.*checkpoint_contexts"):
        checkpoint(inside, x, use_reentrant=False).sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoint_is_as_ever_outside_of_regions(reentrant: bool) -> None:
    m, x = model(), torch.randn(8, 16, requires_grad=True)
    step(m, x.detach())
    want = torch.autograd.grad(m(x).sum(), [x])[0]
    checkpoint(m, x, use_reentrant=reentrant).sum().backward()
    assert torch.equal(x.grad, want)


def test_presets_that_compute_again() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        mlp, x = te.LayerNormMLP(16, 32, checkpoint=again), torch.randn(8, 16, requires_grad=True)
        for _ in range(3):
            with te.autocast(recipe=RECIPE):
                y = mlp(x)
            y.square().sum().backward()
        found.append([y, x.grad, mlp.fc1_weight.grad, *numbers(mlp)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_threads_have_regions_of_their_own() -> None:
    """One is in a region, the other in none, on one model; both give what they give alone."""
    m, x = model(), torch.randn(8, 16)
    with torch.no_grad():
        plain = m(x)
        with te.autocast(recipe=RECIPE):
            quantized = m(x)
    wrong = []

    def run(on: bool) -> None:
        for _ in range(50):
            with torch.no_grad(), te.autocast(enabled=on, recipe=RECIPE):
                if not torch.equal(m(x), quantized if on else plain):
                    wrong.append(on)

    in_threads(lambda: run(True), lambda: run(False))
    assert wrong == [] and not torch.equal(plain, quantized)


@pytest.mark.parametrize("folds", [False, True], ids=["before the next region", "after it was entered"])
def test_another_thread_trains_while_a_forward_runs_again(folds: bool) -> None:
    """Its entries fold, and its calls read and record: each of the two finds what it finds alone."""
    values, gradients, *models = _trained_beside(folds, together=False)
    values_again, gradients_again, *models_again = _trained_beside(folds, together=True)
    assert torch.equal(*values) and torch.equal(*values_again) and torch.equal(values[0], values_again[0])
    assert all(torch.equal(a, b) for a, b in zip(gradients, gradients_again, strict=True))
    assert all(same(a, b) for a, b in zip(models, models_again, strict=True))


def _trained_beside(folds: bool, together: bool) -> tuple[Any, ...]:
    """A checkpoint's values, twice, its gradients, and two models: one trains in the other's backward, or later."""
    torch.manual_seed(0)
    x, mine, other, seen = torch.randn(8, 16), model(), model(), []
    for m in (mine, other):
        step(m, x)

    def beside() -> None:
        step(other, 50 * x)
        step(other, 5 * x)

    def function(t: torch.Tensor) -> torch.Tensor:
        half = mine[:2](t)
        if seen and together:
            in_threads(beside)
        y = mine[2:](half)
        seen.append(y.detach())
        return y * y.detach().sin()

    given = (30 * x).requires_grad_()
    with te.autocast(recipe=RECIPE):
        y = te.checkpoint(function, given)
    if folds:
        with te.autocast(recipe=RECIPE):
            pass
    gradients = torch.autograd.grad(y.square().sum(), [given, *mine.parameters()])
    if not together:
        beside()
    return seen, gradients, mine, other


@pytest.mark.parametrize(
    ("other", "called"), [(None, True), (DelayedScaling(margin=1), False), (Float8CurrentScaling(), True)], ids=str
)
@pytest.mark.parametrize("way", WAYS)
def test_products_run_again_by_what_was_said_of_them(way: str, called: bool, other: Recipe | None) -> None:
    """Another recipe in between is refused in words; one that was taken back, or is another model's, is nothing."""
    m, x = model(), torch.randn(8, 16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        ys = [WAYS[way](m, x) for _ in range(3)]
    te.precision(model(), {"1": other})
    ys[0].sum().backward()
    te.precision(m, {"1": other})
    if called:
        with te.autocast(recipe=RECIPE):
            m(x).sum().backward()
    with pytest.raises(RuntimeError, match=r"^1\.matmul: te_fuser\.precision was called between .*: call it before"):
        ys[1].sum().backward()
    te.precision(m, {"1": RECIPE})
    ys[2].sum().backward()

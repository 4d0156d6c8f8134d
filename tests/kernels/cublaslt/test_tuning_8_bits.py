"""Products of 8 bits run by measured algorithms, as those of other dtypes do. Library and clocks are made up."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Sequential, _native, ops
from te_fuser.fuser.tune import tune as tuning
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt import tuning as module
from te_fuser.kernels.cublaslt.tuned import ProductProblem
from te_fuser.kernels.cublaslt.tuning import example, places_of, tune_products
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.fake_cublaslt import FakeCublasLt
from tests.float8 import E4M3
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.kernels.cublaslt.process import a_new_process
from tests.kernels.cublaslt.test_tuned import BLOCKS, LAYOUTS, PAIRS
from tests.needs import needs_compiler

BF16, F32 = torch.bfloat16, torch.float32
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def as_long_alone(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On that GPU every algorithm takes as long as another one alone."""
    monkeypatch.setattr(module, "_seconds_of", lambda place: [1.0] * len(place.algorithms))
    a_new_process()
    yield
    a_new_process()


def ones(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(*shape).to(dtype)


# Memory on the CPU is not always aligned alike: one problem has its own tensors.
A, B, ONE, OUT = ones(5, 32), ones(6, 32), torch.ones(()), torch.empty(5, 6)
WIDE = A.float(), B.float(), torch.empty(5, 6)
HOW = "plain", E4M3, E4M3, F32
FORM = products.form_of_8(*HOW, True)


def native(fast: bool) -> _native.CudaMatmul:
    """The product of that form, or of the one that sums in float32."""
    return products.product_of(products.form_of_8(*HOW, fast))


def run(fast: bool = True) -> None:
    """A B^T, always the same problem."""
    native(fast)((A, B, ONE, ONE, OUT))


def ran(cublaslt: FakeCublasLt, call: Any) -> list[int]:
    """Algorithms that a call runs, numbered from 1."""
    cublaslt.by_algorithm[:] = [0] * 4
    call()
    return [k for k in range(4) for _ in range(cublaslt.by_algorithm[k])]


@pytest.mark.parametrize(
    ("kind", "transposes", "scales"),
    [
        *itertools.product(products.KINDS_8, LAYOUTS, [("one", "one")]),
        *itertools.product(("plain", "onto"), LAYOUTS[:1], BLOCKS),
    ],
)
def test_an_example_is_the_very_problem(
    cublaslt: FakeCublasLt, kind: str, transposes: tuple[bool, bool], scales: tuple[str, str]
) -> None:
    """Also where rows lie apart; with as many scales as the product wants."""
    cublaslt.any_layout, (m, n, k) = 1, (16, 48, 1280)
    for a, b in PAIRS:
        form = products.form_of_8(kind, a, b, F32, False, transposes, scales)
        product = products.product_of(form)
        counts = [module._scales(lie, rows, k) for lie, rows in zip(scales, (m, n), strict=True)]
        shapes = (k, m) if transposes[0] else (m, k), (n, k) if transposes[1] else (k, n)
        for apart in (0, 16):
            wide = ones(shapes[0][0], shapes[0][1] + apart, dtype=a)[:, : shapes[0][1]]
            tensors = [wide, ones(*shapes[1], dtype=b), *map(torch.ones, counts)]
            tensors += [torch.empty(m, n + apart)[:, :n], *([torch.ones(n)] if kind == "bias" else [])]
            problem = ProductProblem(*product.problem(tuple(tensors)))
            made = example(product, form, problem, CPU)
            assert product.problem(made) == problem
            product(made)


def test_products_of_all_dtypes_are_tuned_together(cublaslt: FakeCublasLt) -> None:
    def model() -> None:
        products.configured("forward", F32, F32)(WIDE)
        run()

    def contest(first: Any, second: Any) -> float:
        return 0.9 if sorted(ran(cublaslt, second)) == [1, 2] else 1.0

    tried = tune_products(model, contest, 0.005)
    places = ["forward float32 5x6x32", f"{FORM} 5x6x32"]
    assert [str(p) for p in places_of(model)] == places
    assert {(t.place, t.choice) for t in tried} == {(p, c) for p in places for c in ("#2", "#3")} | {
        ("algorithms of products together", "all")
    }
    assert [(t.place, t.choice) for t in tried if t.taken][0] == (places[0], "#2")


def test_ranks_have_their_places_in_one_order(cublaslt: FakeCublasLt) -> None:
    """Whatever their GPUs are numbered, and whichever problem each met first."""
    others = [ones(5, 64)[:, :32], A]
    for order in (others, others[::-1]):
        a_new_process()

        def model(order: list[torch.Tensor] = order) -> None:
            for a in order:
                native(True)((a, B, ONE, ONE, OUT))

        assert [p.problem.a_stride for p in places_of(model)] == [32, 64]


# ---- in a region -------------------------------------------------------------------------------------------------

RECIPES = {"delayed": DelayedScaling(amax_history_len=2), "kept": DelayedScaling(amax_history_len=2)}
RECIPES |= {"current": Float8CurrentScaling(), "blocks": Float8BlockScaling()}  # type: ignore[dict-item]


@needs_compiler
@pytest.mark.usefixtures("on_an_emulated_gpu")
@pytest.mark.parametrize("name", RECIPES)
def test_a_model_is_tuned_in_a_region(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its three products by another algorithm, which is named and kept; its scales, weights and results stay."""
    recipe = RECIPES[name]
    monkeypatch.setattr(module, "MOST_IN_PLACE", 1)
    monkeypatch.setattr(tuning, "_contest_on", lambda *given: _gaining)
    for others in ("_schedule_trials", "_candidates"):  # which are not measured here
        monkeypatch.setattr(tuning, others, lambda *given: [])
    model, x = Sequential(ops.LayerNorm(128), ops.Linear(128, 256)).to(BF16), torch.randn(16, 128).to(BF16)
    x.requires_grad_()

    def results(first: bool | None = None) -> list[torch.Tensor]:
        with te_fuser.autocast(recipe=recipe), microbatch(first):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], torch.ones_like(y))]

    first = None if name != "kept" else False
    results(None if first is None else True)
    before, held = results(first), _state(model)
    with te_fuser.autocast(recipe=recipe), microbatch(first):
        report = model.tune(x)
        said = str(model.explain(x, details=True))
    tried = [t for t in report.trials if t.choice == "#2"]
    assert [t.place[:9] for t in tried] == ["quantized"] * 3 and all(t.taken for t in tried), report
    said = re.sub("\\s+", " ", said)
    assert said.count("algorithm: tuned: candidate 2") == (2 if name == "blocks" else 3), said
    assert _state(model) == held
    for after, exact in zip(results(first), before, strict=True):
        assert torch.equal(after, exact)


def _gaining(first: Any, second: Any, effort: object) -> float:
    for call in (first, second):
        call()
    return 0.9


def _state(model: torch.nn.Module) -> dict[str, tuple[float, list[float]]]:
    return {name: (float(scale), history.tolist()) for name, (scale, history) in states(model).items()}

"""Measured algorithms: what is kept, what a product makes of it, and how products of 8 bits are tuned."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Sequential, _native, ops
from te_fuser.fuser.tune import tune as tuning
from te_fuser.kernels.cublaslt import products, tuned
from te_fuser.kernels.cublaslt import tuning as module
from te_fuser.kernels.cublaslt.tuned import ProductForm, ProductProblem, TunedAlgorithm, TunedProducts
from te_fuser.kernels.cublaslt.tuning import example, places_of, tune_products
from te_fuser.quantization import microbatch, states
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from tests.fake_cublaslt import FakeCublasLt, a_new_process
from tests.float8 import E4M3, E5M2
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.needs import needs_compiler

BF16, F32 = torch.bfloat16, torch.float32
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
LAYOUTS = [products.ALONG, (False, False), (True, False)]
BLOCKS = [("rows", "squares"), ("squares", "rows"), ("rows", "rows")]
pytestmark = pytest.mark.usefixtures("a_gpu")

# Memory on the CPU is not always aligned alike: a problem has its own tensors.
X, W, OUT = torch.randn(5, 32), torch.randn(6, 32), torch.empty(5, 6)
X8, W8, ONE = X.to(E4M3), W.to(E4M3), torch.ones(())
WIDE = products.form_of("forward", F32, F32)
NARROW = products.form_of_8("plain", E4M3, E4M3, F32, True)


def run_wide() -> None:
    """x W^T, always the same problem."""
    products.configured("forward", F32, F32)((X, W, OUT))


def run_narrow(fast: bool = True, x: torch.Tensor = X8) -> None:
    """Product x W^T of 8 bits; without `fast` by the one that sums in float32."""
    products.product_of(products.form_of_8("plain", E4M3, E4M3, F32, fast))((x, W8, ONE, ONE, OUT))


# By form: the same problem again, another problem, another product.
Runs = tuple[ProductForm, Callable[[], object], list[Callable[[], object]]]
RUNS: dict[str, Runs] = {
    "wide": (WIDE, run_wide, [lambda: products.multiply("forward", torch.ones(7, 32), W),
     lambda: products.multiply("forward_bias", X, W, torch.ones(6))]),
    "of 8 bits": (NARROW, run_narrow, [lambda: run_narrow(fast=False)]),
}  # fmt: skip
each = pytest.mark.parametrize("which", RUNS)


def keep(which: str, candidate: int) -> tuple[TunedProducts, ProductProblem, bytes]:
    """Run once, and keep a candidate for the problem."""
    form, run, _ = RUNS[which]
    run()
    product = products.in_use[form]
    ((met, _),) = product.problems().items()
    algorithm, store = product.algorithms(met)[candidate - 1][0], tuned.store_on(0)
    assert store is not None
    store.put(ProductProblem(*met).key(form), algorithm, candidate, 0.97)
    return store, ProductProblem(*met), algorithm


def forms() -> Iterator[ProductForm]:
    """All that a product is configured by."""
    yield from (products.form_of(kind, BF16, out) for kind in products.KINDS for out in (BF16, F32))
    for kind, pair, out, fast in itertools.product(products.KINDS_8, PAIRS, products.DTYPES, (False, True)):
        for transposes in LAYOUTS:
            yield products.form_of_8(kind, *pair, out, fast, transposes)
        if not fast:
            yield from (products.form_of_8(kind, *pair, out, fast, scales=scales) for scales in BLOCKS)


def test_problem_says_what_it_is_and_forms_are_kept_apart() -> None:
    p = ProductProblem(3, 8, 16, 4, 4, 4, 16, 16, 0, 0x86541 | 1)
    assert str(p) == "8x16x4" and p.flipped == (True, False)
    assert [p.alignment(role) for role in ("a", "b", "c", "out")] == [16, 32, 64, 256]
    # Equal GPUs share what one of them found; everything else is a problem of its own.
    keys = {q.key(WIDE) for q in (p, p._replace(device=0))}
    assert len(keys) == 1
    keys |= {p._replace(**{name: 9}).key(WIDE) for name in ProductProblem._fields[1:]}
    assert len(keys) == 10 and len(keys | {p.key(products.form_of("dgrad", F32, F32))}) == 11
    found = [*forms()]
    assert len({p.key(form) for form in found}) == len({*found}) == len(found)
    blocks = products.form_of_8("onto", E5M2, E4M3, F32, False, scales=("rows", "squares"))
    by_rows = products.form_of_8("bias", E4M3, E4M3, BF16, False, (False, False))
    assert [*map(str, (products.form_of("wgrad_onto", BF16, F32), WIDE, NARROW, blocks, by_rows))] == [
        "wgrad_onto bfloat16 to float32",
        "forward float32",
        "quantized float8_e4m3fn x float8_e4m3fn fast to float32",
        "quantized_onto float8_e5m2 x float8_e4m3fn of rows x squares to float32",
        "quantized_bias float8_e4m3fn x float8_e4m3fn by rows to bfloat16",
    ]


@each
def test_kept_algorithm_runs_from_the_first_call_of_a_new_process(
    which: str, cublaslt: FakeCublasLt, tmp_path: Path
) -> None:
    form, run, others = RUNS[which]
    run()
    assert cublaslt.last_workspace == 1024
    want = OUT.clone()
    _, problem, algorithm = keep(which, 3)
    assert tuned.found_for(form, problem) == TunedAlgorithm(algorithm, 3)
    assert str(tuned.found_for(form, problem)) == "tuned: candidate 3"
    assert [f.name for f in tmp_path.rglob("*.json")] == ["nvidia-h200.products.json"]
    a_new_process()
    run()
    assert torch.equal(OUT, want) and cublaslt.last_workspace == 3072
    for other in others:
        other()
        assert cublaslt.last_workspace == 1024
        run()
        assert cublaslt.last_workspace == 3072


def test_another_version_of_the_library_starts_afresh(cublaslt: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    keep("wide", 3)
    a_new_process()
    monkeypatch.setattr(_native, "cublaslt_version", lambda: 130200)
    run_wide()
    assert cublaslt.last_workspace == 1024


@each
def test_algorithm_that_the_library_refuses_is_dropped_with_its_words(which: str, cublaslt: FakeCublasLt) -> None:
    form, run, _ = RUNS[which]
    run()
    want = OUT.clone()
    store, problem, _ = keep(which, 2)
    a_new_process()
    cublaslt.refused_algorithm = 2
    run()
    assert torch.equal(OUT, want) and cublaslt.last_workspace == 1024
    words = "first heuristic, since cuBLASLt refused the tuned algorithm: CUBLAS_STATUS_NOT_SUPPORTED"
    assert str(tuned.found_for(form, problem)) == words
    assert products.algorithms_of(form, (problem.m, problem.n, problem.k)) == words
    cublaslt.refused_algorithm = 0
    a_new_process()
    run()
    assert cublaslt.last_workspace == 1024, "it stays dropped until it is tuned again"
    store.put(problem.key(form), bytes([2]) + bytes(63), 2, 0.9)
    a_new_process()
    run()
    assert cublaslt.last_workspace == 2048


def test_store_that_fails_costs_the_choice_and_not_the_call(
    cublaslt: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: heard.append(what.exc_value))

    def broken(device: int) -> TunedProducts:
        raise ArithmeticError("no store")

    with monkeypatch.context() as patch:
        patch.setattr(tuned, "store_on", broken)
        run_wide()
    assert cublaslt.products == 1 and [str(e) for e in heard] == ["no store"]


def test_without_a_gpu_nothing_is_kept(cublaslt: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert tuned.store_on(0) is None
    run_wide()
    assert cublaslt.products == 1


def test_what_finds_and_drops_is_given_together() -> None:
    for wrong in (3, (len,), "ab"):
        with pytest.raises(TypeError, match=r"tuned is \(find, drop\)"):
            _native.CudaMatmul("p", "float32", tuned=wrong)  # type: ignore[arg-type]


def test_what_was_kept_comes_back_and_is_forgotten(tmp_path: Path) -> None:
    store, algorithm = TunedProducts(tmp_path / "gpu.json"), bytes(range(64))
    store.put("a", algorithm, 4, 0.98)
    store.put("b", algorithm, 2, 0.9)
    store.drop("b", "it is gone")
    for other in (store, TunedProducts(store.path)):
        assert other.find("a") == TunedAlgorithm(algorithm, 4) and other.find("c") is None
        assert other.find("b") == TunedAlgorithm(algorithm, 2, "it is gone")
    store.forget("a")
    store.forget("a")
    assert TunedProducts(store.path).find("a") is None and store.find("b") is not None


@pytest.mark.parametrize(
    "entry", [{}, {"candidate": 2}, {"candidate": "2", "algorithm": "00" * 64}, {"candidate": 2, "algorithm": "xy"},
              {"candidate": 2, "algorithm": 5}, {"candidate": 2, "algorithm": "00" * 63},
              {"candidate": 2, "algorithm": "00" * 64, "dropped": 1}], ids=str,
)  # fmt: skip
def test_damaged_entry_counts_as_none(entry: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"format": 1, "entries": {"a": entry}}))
    assert TunedProducts(path).find("a") is None


@pytest.fixture(autouse=True)
def as_long_alone(a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """On that GPU every algorithm takes as long as another one alone."""
    monkeypatch.setattr(module, "_seconds_of", lambda place: [1.0] * len(place.algorithms))
    a_new_process()
    yield
    a_new_process()


def ones(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    return torch.ones(*shape).to(dtype)


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
            made = example(product, form, problem, torch.device("cpu"))
            assert product.problem(made) == problem
            product(made)


def test_products_of_all_dtypes_are_tuned_together(cublaslt: FakeCublasLt) -> None:
    def model() -> None:
        run_wide()
        run_narrow()

    def contest(first: Any, second: Any) -> float:
        return 0.9 if sorted(cublaslt.algorithms_of(second)) == [1, 2] else 1.0

    tried = tune_products(model, contest, 0.005)
    places = ["forward float32 5x6x32", f"{NARROW} 5x6x32"]
    assert [str(p) for p in places_of(model)] == places
    assert {(t.place, t.choice) for t in tried} == {(p, c) for p in places for c in ("#2", "#3")} | {
        ("algorithms of products together", "all")
    }
    assert [(t.place, t.choice) for t in tried if t.taken][0] == (places[0], "#2")


def test_ranks_have_their_places_in_one_order(cublaslt: FakeCublasLt) -> None:
    """Whatever their GPUs are numbered, and whichever problem each met first."""
    others = [ones(5, 64)[:, :32], X8]
    for order in (others, others[::-1]):
        a_new_process()

        def model(order: list[torch.Tensor] = order) -> None:
            for x in order:
                run_narrow(x=x)

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

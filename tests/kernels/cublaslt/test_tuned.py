"""The store of measured algorithms: what comes back, what a product makes of it when it first meets a problem."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from te_fuser import _native
from te_fuser.kernels.cublaslt import products, tuned
from te_fuser.kernels.cublaslt.tuned import ProductForm, ProductProblem, TunedAlgorithm, TunedProducts
from tests.fake_cublaslt import FakeCublasLt
from tests.float8 import E4M3, E5M2
from tests.kernels.cublaslt.process import a_new_process

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


def run_narrow(fast: bool = True) -> None:
    """Product x W^T of 8 bits; without `fast` by the one that sums in float32."""
    products.product_of(products.form_of_8("plain", E4M3, E4M3, F32, fast))((X8, W8, ONE, ONE, OUT))


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

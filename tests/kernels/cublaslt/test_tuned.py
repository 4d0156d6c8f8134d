"""The store of measured algorithms: what comes back, what a product makes of it when it first meets a problem."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import _native
from te_fuser.kernels.cublaslt import products, tuned
from te_fuser.kernels.cublaslt.tuned import ProductProblem, TunedAlgorithm, TunedProducts
from tests import fake_cublaslt, fake_cuda
from tests.fake_cublaslt import FakeCublasLt

FORM = products.form_of("forward", torch.float32, torch.float32)


@pytest.fixture(scope="module")
def libraries() -> tuple[Path, Path]:
    return fake_cuda.compile_driver(), fake_cublaslt.compile_library()


@pytest.fixture
def library(libraries: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCublasLt]:
    """A GPU with a cache folder of its own."""
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")
    with fake_cuda.in_place(libraries[0]), fake_cublaslt.in_place(libraries[1]) as fake:
        a_new_process()
        yield fake
    a_new_process()


def a_new_process() -> None:
    """Products that met no problem yet."""
    products.configured.cache_clear()
    products.in_use.clear()


X, W, OUT = torch.randn(5, 8), torch.randn(6, 8), torch.empty(5, 6)  # memory on the CPU is not always aligned alike


def run() -> None:
    """x W^T, always the same problem."""
    products.configured("forward", torch.float32, torch.float32)((X, W, OUT))


def keep(candidate: int = 2) -> tuple[TunedProducts, ProductProblem, bytes]:
    """Run once, and keep a candidate for the problem."""
    run()
    product = products.in_use[FORM]
    ((met, _),) = product.problems().items()
    algorithm, store = product.algorithms(met)[candidate - 1][0], tuned.store_on(0)
    assert store is not None
    store.put(ProductProblem(*met).key(FORM), algorithm, candidate, 0.97)
    return store, ProductProblem(*met), algorithm


def test_a_problem_says_what_it_is() -> None:
    p = ProductProblem(3, 8, 16, 4, 4, 4, 16, 16, 0, 0x86541 | 1)
    assert str(p) == "8x16x4" and p.flipped == (True, False)
    assert [p.alignment(role) for role in ("a", "b", "c", "out")] == [16, 32, 64, 256]
    assert str(products.form_of("wgrad_onto", torch.bfloat16, torch.float32)) == "wgrad_onto bfloat16 to float32"
    assert str(FORM) == "forward float32"
    # Equal GPUs share what one of them found; everything else is a problem of its own.
    keys = {q.key(FORM) for q in (p, p._replace(device=0))}
    assert len(keys) == 1
    keys |= {p._replace(**{name: 9}).key(FORM) for name in ProductProblem._fields[1:]}
    assert len(keys) == 10 and len(keys | {p.key(products.form_of("dgrad", torch.float32, torch.float32))}) == 11


def test_a_kept_algorithm_runs_from_the_first_call_of_a_new_process(library: FakeCublasLt, tmp_path: Path) -> None:
    run()
    assert library.last_workspace == 1024
    want = OUT.clone()
    _, problem, algorithm = keep(3)
    assert tuned.found_for(FORM, problem) == TunedAlgorithm(algorithm, 3)
    assert str(tuned.found_for(FORM, problem)) == "tuned: candidate 3"
    assert [f.name for f in tmp_path.rglob("*.json")] == ["nvidia-h200.products.json"]
    a_new_process()
    run()
    assert torch.equal(OUT, want) and library.last_workspace == 3072
    products.multiply("forward", torch.ones(7, 8), W)
    assert library.last_workspace == 1024, "another problem"
    run()
    assert library.last_workspace == 3072
    products.multiply("forward_bias", X, W, torch.ones(6))
    assert library.last_workspace == 1024, "another product"


def test_another_version_of_the_library_starts_afresh(library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    keep(3)
    a_new_process()
    monkeypatch.setattr(_native, "cublaslt_version", lambda: 130200)
    run()
    assert library.last_workspace == 1024


def test_an_algorithm_that_the_library_refuses_is_dropped_with_its_words(library: FakeCublasLt) -> None:
    store, problem, _ = keep(2)
    a_new_process()
    library.refused_algorithm = 2
    run()
    torch.testing.assert_close(OUT.double(), X.double() @ W.double().T, rtol=1e-6, atol=1e-6)
    assert library.last_workspace == 1024
    found = tuned.found_for(FORM, problem)
    words = "first heuristic, since cuBLASLt refused the tuned algorithm: CUBLAS_STATUS_NOT_SUPPORTED"
    assert str(found) == words
    library.refused_algorithm = 0
    a_new_process()
    run()
    assert library.last_workspace == 1024, "it stays dropped until it is tuned again"
    store.put(problem.key(FORM), bytes([2]) + bytes(63), 2, 0.9)
    a_new_process()
    run()
    assert library.last_workspace == 2048


def test_a_store_that_fails_costs_the_choice_and_not_the_call(
    library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: heard.append(what.exc_value))

    def broken(device: int) -> TunedProducts:
        raise ArithmeticError("no store")

    with monkeypatch.context() as patch:
        patch.setattr(tuned, "store_on", broken)
        run()
    assert library.products == 1 and [str(e) for e in heard] == ["no store"]


def test_without_a_gpu_nothing_is_kept(library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert tuned.store_on(0) is None
    run()
    assert library.products == 1


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
def test_a_damaged_entry_counts_as_none(entry: dict[str, object], tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps({"format": 1, "entries": {"a": entry}}))
    assert TunedProducts(path).find("a") is None

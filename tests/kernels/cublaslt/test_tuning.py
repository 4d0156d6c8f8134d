"""Tuning the algorithms of products: what is tried, what is taken, what stays on disk. The clocks are made up here."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.tune import tune as tuning
from te_fuser.fusions import Details, cublaslt, fusion
from te_fuser.fusions.match import Cost
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt import tuning as module
from te_fuser.kernels.cublaslt.tuned import ProductProblem, found_for, store_on
from te_fuser.kernels.cublaslt.tuning import PlacedProduct, example, places_of, tune_products
from te_fuser.kernels.tuning_trials import Deciding, Trial
from tests.fake_cublaslt import FakeCublasLt, a_new_process

SECONDS_OF = module._seconds_of
F32 = torch.float32
FORWARD = products.form_of("forward", F32, F32)


@pytest.fixture(autouse=True)
def library(cublaslt: FakeCublasLt, a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> FakeCublasLt:
    """On that GPU every algorithm takes as long as another one alone."""
    alone(monkeypatch, lambda place: [1.0] * len(place.algorithms))
    return cublaslt


def alone(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[PlacedProduct], list[float]]) -> None:
    monkeypatch.setattr(module, "_seconds_of", seconds)


X, W, Y = torch.randn(5, 8), torch.randn(6, 8), torch.empty(5, 6)
BACK, DX = torch.randn(6, 3), torch.empty(5, 3)


def small() -> None:
    """x W^T."""
    products.configured("forward", F32, F32)((X, W, Y))


def model() -> None:
    """Two products."""
    small()
    products.configured("dgrad", F32, F32)((Y, BACK, DX))


class Times:
    """A clock: the model takes so long by these algorithms, numbered from 1 as the fake library's are."""

    def __init__(self, library: FakeCublasLt, seconds: dict[int, float]) -> None:
        self.library, self.seconds, self.contests = library, seconds, 0

    def of(self, call: Callable[[], None]) -> float:
        before = list(self.library.by_algorithm)
        call()
        ran = [after - b for after, b in zip(self.library.by_algorithm, before, strict=True)]
        return sum(times * self.seconds.get(k, 1.0) for k, times in enumerate(ran)) or 10.0  # without the library

    def contest(self, first: Callable[[], None], second: Callable[[], None]) -> float:
        self.contests += 1
        before = self.of(first)
        return self.of(second) / before


def kept() -> list[str]:
    """Entries on disk for the two problems."""
    return [str(found_for(p.form, p.problem)) for p in sorted(places_of(model), key=str, reverse=True)]


# ---- what is tried and taken -------------------------------------------------------------------------------------


def test_the_problems_of_a_call_are_found_with_the_most_work_first() -> None:
    small()  # met before, and not for the last time
    products.multiply("forward", torch.ones(50, 8), W)
    places = places_of(lambda: (model(), small())[0])
    assert [str(p) for p in places] == ["forward float32 5x6x8", "dgrad float32 5x3x6"]
    assert [len(p.algorithms) for p in places] == [3, 3]
    assert places_of(lambda: None) == []


def test_what_makes_the_model_faster_is_taken_and_kept(library: FakeCublasLt) -> None:
    times = Times(library, {2: 0.98, 3: 0.9})
    tried = tune_products(model, times.contest, 0.005)
    assert [(t.place, t.choice, t.taken, t.reason) for t in tried] == [
        ("forward float32 5x6x8", "#2", False, "another one is faster still"),
        ("forward float32 5x6x8", "#3", True, ""),
        ("dgrad float32 5x3x6", "#2", False, "another one is faster still"),
        ("dgrad float32 5x3x6", "#3", True, ""),
        ("algorithms of products together", "all", True, ""),
    ]
    assert [round(t.ratio or 0, 4) for t in tried] == [0.99, 0.9596, 0.9895, 0.9574, 0.9]
    assert library.algorithms_of(model) == [3, 3] and kept() == ["tuned: candidate 3"] * 2
    a_new_process()
    assert library.algorithms_of(model) == [3, 3]


def test_each_problem_has_a_choice_of_its_own(library: FakeCublasLt) -> None:
    def contest(first: Callable[[], None], second: Callable[[], None]) -> float:
        ran = library.algorithms_of(second)
        return {(1, 2): 0.99, (2, 3): 0.98}.get((ran[0], ran[1]), 1.0)

    tried = tune_products(model, contest, 0.005)
    assert [(t.choice, t.taken) for t in tried if t.taken] == [("#2", True), ("#3", True), ("all", True)]
    a_new_process()
    assert library.algorithms_of(small) == [2] and library.algorithms_of(model) == [2, 3]


def test_what_gains_less_than_the_margin_is_not_taken(library: FakeCublasLt) -> None:
    times = Times(library, {2: 0.995, 3: 1.1})
    tried = tune_products(model, times.contest, 0.005)
    assert len(tried) == 4 and not any(t.taken for t in tried) and times.contests == 4
    assert library.algorithms_of(model) == [1, 1] and kept() == ["None"] * 2


def test_choices_that_are_not_faster_together_are_dropped(library: FakeCublasLt) -> None:
    ratios = iter([0.9, 1.0, 0.9, 1.0, 1.0])
    tried = tune_products(model, lambda first, second: next(ratios), 0.005)
    assert [t.reason for t in tried] == ["together not faster", "", "together not faster", "", ""]
    assert not any(t.taken for t in tried)
    assert library.algorithms_of(model) == [1, 1] and kept() == ["None"] * 2


def test_what_computes_something_else_is_refused(library: FakeCublasLt) -> None:
    """Each candidate is in force inside of what it is compared in, and no other one than the first outside of it."""

    def reason_not(within: AbstractContextManager[None]) -> str:
        with within:
            tried = library.algorithms_of(model)
        assert library.algorithms_of(model) == [1, 1]
        return "wrong" if 3 in tried else ""

    tried = tune_products(model, Times(library, {2: 0.9, 3: 0.1}).contest, 0.005, reason_not)
    assert [(t.choice, t.ratio is None, t.taken, t.reason) for t in tried] == [
        ("#3", True, False, "wrong"), ("#2", False, True, ""), ("#3", True, False, "wrong"), ("#2", False, True, ""),
        ("all", False, True, ""),
    ]  # fmt: skip
    assert library.algorithms_of(model) == [2, 2] and kept() == ["tuned: candidate 2"] * 2


def test_tuning_again_starts_afresh(library: FakeCublasLt) -> None:
    tune_products(model, Times(library, {3: 0.9}).contest, 0.005)
    assert library.algorithms_of(model) == [3, 3]
    first = Times(library, {1: 0.9})
    tried = tune_products(model, first.contest, 0.005)
    assert [t.choice for t in tried] == ["#2", "#3", "#2", "#3"] and not any(t.taken for t in tried)
    assert library.algorithms_of(model) == [1, 1] and kept() == ["None"] * 2


def test_an_error_on_the_way_leaves_the_first_guesses(library: FakeCublasLt) -> None:
    def contest(first: Callable[[], None], second: Callable[[], None]) -> float:
        if library.algorithms_of(second) == [1, 3]:
            raise KeyboardInterrupt
        return 0.9

    with pytest.raises(KeyboardInterrupt):
        tune_products(model, contest, 0.005)
    assert library.algorithms_of(model) == [1, 1] and kept() == ["None"] * 2


def test_where_another_rank_decides(library: FakeCublasLt) -> None:
    """Its candidates are tried, and it keeps what is taken."""
    times, asked = Times(library, {3: 0.9}), list[tuple[str, object]]()

    def first(what: str, value: object) -> list[int]:
        asked.append((what, value))
        return [2]

    tried = tune_products(model, times.contest, 0.005, deciding=Deciding(first, False))
    assert [(t.choice, t.taken) for t in tried] == [("#3", True), ("#3", True), ("all", True)]
    assert asked == [(f"algorithms of {p}", [1, 2]) for p in ("forward float32 5x6x8", "dgrad float32 5x3x6")]
    assert library.algorithms_of(model) == [3, 3] and kept() == ["None"] * 2


# ---- what is not worth trying ------------------------------------------------------------------------------------


def test_candidates_that_do_not_keep_up_alone_are_not_tried(
    library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch, lambda place: [1.0, 1.06, 1.04])
    times = Times(library, {})
    assert [t.choice for t in tune_products(model, times.contest, 0.005)] == ["#3", "#3"]
    alone(monkeypatch, lambda place: [1.0, 1.06, 2.0])
    tried = tune_products(small, times.contest, 0.005)
    assert tried == [Trial("forward float32 5x6x8", "#1", None, False, "no other algorithm keeps up alone")]
    assert times.contests == 2


def test_no_more_are_tried_than_are_worth_it_and_the_fastest_first(
    library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(monkeypatch, lambda place: [1.0, 0.9, 0.8])
    monkeypatch.setattr(module, "MOST_IN_PLACE", 1)
    assert [t.choice for t in tune_products(model, Times(library, {}).contest, 0.005)] == ["#3", "#3"]


def test_one_algorithm_is_no_choice(library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_LISTED", 1)
    alone(monkeypatch, lambda place: pytest.fail("nothing to time"))
    assert [t.ratio for t in tune_products(small, Times(library, {}).contest, 0.005)] == [None]


def test_each_candidate_is_timed_and_the_first_one_left_in_force(
    library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds = iter([0.3, 0.2, 0.1])
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    monkeypatch.setattr(module, "seconds_alone", lambda work: (work(), next(seconds))[1])
    monkeypatch.setattr(module, "example", lambda *known: example(*known[:3], torch.device("cpu")))
    (place,) = places_of(small)
    library.by_algorithm[:] = [0] * 4
    assert SECONDS_OF(place) == pytest.approx([0.03, 0.02, 0.01])
    assert list(library.by_algorithm) == [0, 10, 10, 10]
    assert library.algorithms_of(small) == [1]


# ---- numbers to time a candidate on ------------------------------------------------------------------------------


def layouts(t: torch.Tensor) -> list[torch.Tensor]:
    wide = torch.cat([t, t[..., :3]], -1)[..., : t.shape[-1]]
    return [t, t.mT.contiguous().mT, wide, torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", products.KINDS)
def test_an_example_is_the_very_problem(kind: str, dtype: torch.dtype) -> None:
    product, m, n, k = products.configured(kind, dtype, dtype), 24, 16, 40
    options = products.KINDS[kind]
    a = torch.ones((k, m) if options.get("transpose_a") else (m, k), dtype=dtype)
    b = torch.ones((n, k) if options.get("transpose_b") else (k, n), dtype=dtype)
    for first in layouts(a):
        for second in layouts(b):
            tensors = [first, second, torch.ones(m, 20, dtype=dtype)[:, :n]]
            tensors += [torch.ones(m, n, dtype=dtype)] if options.get("add") == "c" else []
            epilogue = str(options.get("epilogue"))
            if "bias" in epilogue or "bgrad" in epilogue or "sum" in epilogue:
                tensors.append(torch.ones(m if epilogue == "sum_a" else n, dtype=dtype))
            if "aux" in epilogue or "dgelu" in epilogue:
                tensors.append(torch.ones(m, 24, dtype=dtype)[:, :n])
            problem = ProductProblem(*product.problem(tuple(tensors)))
            made = example(product, products.form_of(kind, dtype, dtype), problem, torch.device("cpu"))
            assert product.problem(made) == problem
            product(made)


# ---- the whole ---------------------------------------------------------------------------------------------------


def by_the_library(given: Callable[[Callable[[], None]], torch.Tensor]) -> None:
    """Plans on the CPU whose products are the fake library's: `given` runs one, and says what comes of it."""

    @fusion(
        forward=[ops.MatMul],
        name="by_the_library",
        details=Details(takes=("input", "0.weight")),
        cost=lambda m: Cost(seconds=1e-9),
    )
    def by_the_library(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        X.copy_(x)
        W.copy_(weight)
        return given(small)


def test_tune_lists_the_algorithms_that_it_tried(library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    by_the_library(lambda run: (run(), Y.clone())[1])
    linear, x, times = Sequential(ops.MatMul(8, 6)), torch.randn(5, 8), Times(library, {2: 0.9})
    monkeypatch.setattr(tuning, "_contest_on", lambda *given: lambda a, b, effort: times.contest(a, b))
    with torch.no_grad():
        y = linear(x)
        report = linear.tune(x, margin=0.05)
        assert torch.equal(linear(x), y) and library.algorithms_of(lambda: linear(x)) == [2]
    found = [t for t in report.trials if t.place.startswith(("forward", "algorithms"))]
    assert [(t.choice, t.taken) for t in found] == [("#2", True), ("#3", False), ("all", True)]
    lines = [line.split() for line in str(report).splitlines()]
    assert ["forward", "float32", "5x6x8", "#2", "0.9000", "taken"] in lines
    assert ["algorithms", "of", "products", "together", "all", "0.9000", "taken"] in lines


def test_what_ran_before_in_the_process_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model without products of the library is run as often as ever, and nothing of it is tried."""
    runs: list[int] = []

    @fusion(forward=[ops.MatMul], details=Details(takes=("input", "0.weight"), registered=False))
    def counted(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        runs.append(1)
        return x @ weight.T

    monkeypatch.setattr(tuning, "_contest_on", lambda *given: lambda a, b, effort: 1.0)
    found = []
    for before in (a_new_process, small):
        before()
        runs.clear()
        with fusions.only(counted), torch.no_grad():
            report = Sequential(ops.MatMul(8, 6)).tune(torch.randn(5, 8))
        found.append((len(runs), [t.place for t in report.trials]))
    assert found[0] == found[1] and found[0][0] and not [p for p in found[0][1] if p.startswith("forward")]


def test_a_wrong_algorithm_is_refused(library: FakeCublasLt, monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrong results do not widen the tolerance that they are judged by."""

    def given(run: Callable[[], None]) -> torch.Tensor:
        before = library.by_algorithm[3]
        run()
        return Y * 2 if library.by_algorithm[3] > before else Y.clone()

    by_the_library(given)
    linear, x, times = Sequential(ops.MatMul(8, 6)), torch.randn(5, 8), Times(library, {3: 0.1})
    monkeypatch.setattr(tuning, "_contest_on", lambda *given: lambda a, b, effort: times.contest(a, b))
    with torch.no_grad():
        report = linear.tune(x)
    (wrong,) = (t for t in report.trials if t.choice == "#3")
    assert wrong.ratio is None and not wrong.taken
    assert wrong.reason.startswith("differs from the default: output")
    assert library.algorithms_of(small) == [1]


def test_explain_names_the_algorithm(library: FakeCublasLt) -> None:
    @fusion(
        forward=[ops.MatMul],
        details=Details(
            takes=("input", "0.weight"), choose=lambda m, method: cublaslt.body_of(m, "forward"), registered=False
        ),
        cost=lambda m: Cost(seconds=1e-9),
    )
    def chosen(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    linear, x = Sequential(ops.MatMul(8, 6), ops.MatMul(6, 8)), torch.randn(5, 8)
    with fusions.only(chosen), torch.no_grad():
        assert "algorithm" not in str(linear.explain(x, details=True)), "no problem is known yet"
        linear(x)
        assert str(linear.explain(x, details=True)).count("algorithm: first heuristic") == 2
        for met in products.in_use[FORWARD].problems():
            if met[1:4] == (5, 6, 8):
                store_on(0).put(ProductProblem(*met).key(FORWARD), bytes(64), 3, 0.9)  # type: ignore[union-attr]
        text = str(linear.explain(x, details=True))
        assert text.index("algorithm: tuned: candidate 3") < text.index("algorithm: first heuristic")

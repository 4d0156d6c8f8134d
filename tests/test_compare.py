"""Sizes that an error is measured against."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_fuser import compare
from te_fuser.compare import UPSTREAM, Distance, Row, Tensors, distance, judge, judge_alike

EPS = torch.finfo(torch.float32).eps


def cancelling(data: Mapping[str, torch.Tensor], exact: bool) -> dict[str, torch.Tensor]:
    """A gradient whose terms cancel where all that arrives is equal, as that of a softmax's sum does."""
    dy = data[f"{UPSTREAM}y"]
    return {"dx": dy * data["x"] - dy.flip(-1) * data["x"]}


@pytest.mark.parametrize(("error", "passes"), [(EPS, True), (5 * EPS, False)])
def test_what_cancels_has_the_size_of_its_terms(error: float, passes: bool) -> None:
    # The gradient is 0, and plain PyTorch is exact by chance: the terms, which are 1, say what rounding may leave.
    data = {"x": torch.ones(3, 8), f"{UPSTREAM}y": torch.ones(3, 8)}
    found = {"dx": torch.full((3, 8), error)}
    (row,) = judge("case", found, data, cancelling)
    assert row.passed is passes
    with torch.device("meta"):  # what is drawn for it has values whatever the default device is
        (row,) = judge("case", found, data, cancelling)
    assert row.passed is passes


@pytest.mark.parametrize(("error", "passes"), [(EPS, True), (100 * EPS, True), (1000 * EPS, False)])
def test_what_is_compared_with_another_result_may_move_as_that_does(error: float, passes: bool) -> None:
    """The other one's result moves by 100 ulps on some neighbours, and its data say no more than that."""
    wanted, asked = {"y": torch.ones(3, 8)}, []

    def neighbouring(number: int) -> dict[str, torch.Tensor]:
        asked.append(number)
        return {"y": wanted["y"] * (1 + 100 * EPS * (number % 2))}

    (row,) = judge_alike("case", {"y": wanted["y"] * (1 + error)}, wanted, neighbouring, "the other")
    assert row.passed is passes
    assert len(asked) == {EPS: 0, 100 * EPS: 2}.get(error, 24), "moved data are looked at only where they are needed"


def test_what_overflows_on_other_data_allows_nothing() -> None:
    wanted, near = {"y": torch.ones(3)}, {"y": torch.tensor([1.0, torch.inf, 1.0])}
    (row,) = judge_alike("case", {"y": torch.full((3,), 100.0)}, wanted, lambda number: near, "the other")
    assert not row.passed


def test_what_passes_at_once_is_evaluated_once_in_each_way() -> None:
    """In float64 a model takes twice the time that it takes in float32."""
    asked: list[bool] = []

    def evaluate(data: Tensors, exact: bool) -> dict[str, torch.Tensor]:
        asked.append(exact)
        return {"y": 2 * data["x"]}

    data = {"x": torch.full((3,), 0.5)}
    (row,) = judge("case", {"y": torch.ones(3)}, data, evaluate)
    assert row.passed and sorted(asked) == [False, True]
    # Plain PyTorch doubles every neighbour exactly: that they are other numbers allows nothing.
    (row,) = judge("case", {"y": torch.full((3,), 1 + 2 * EPS)}, data, evaluate)
    assert not row.passed


def test_hopeless_differences_are_not_looked_at_for_long() -> None:
    asked: list[int] = []

    def neighbouring(number: int) -> dict[str, torch.Tensor]:
        asked.append(number)
        return {"y": torch.ones(3)}

    (row,) = judge_alike("case", {"y": torch.full((3,), 2.0)}, {"y": torch.ones(3)}, neighbouring, "the other")
    assert not row.passed and len(asked) < 5
    (row,) = judge_alike("case", {"y": torch.ones(3).double()}, {"y": torch.ones(3)}, neighbouring, "the other")
    assert str(row) == "case: y: is float64 [3], the other gives float32 [3]"


def test_distances_are_those_of_all_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(7, 11), torch.randn(11, 7).t()
    whole = distance(a, b)
    monkeypatch.setattr(compare, "_AT_ONCE", 10)
    pieces = distance(a, b)
    assert pieces.largest == whole.largest == (a.double() - b.double()).abs().max()
    assert pieces.rms == pytest.approx(whole.rms) == pytest.approx((a - b).double().square().mean().sqrt().item())
    a[3, 4] = torch.nan
    assert distance(a, b).largest == float("inf") and distance(a, a) == Distance()


def test_tolerance_is_twice_plain_and_an_ulp() -> None:
    data = {"x": torch.linspace(1.0, 2.0, 100)}

    def evaluate(given: Any, exact: bool) -> Any:
        # Plain PyTorch errs by 1e-5 here, whatever the data.
        return {"y": given["x"] * 1.0 if exact else given["x"] * (1 + 1e-5)}

    for factor, passes in ((1.0, True), (1.9, True), (2.2, False)):
        (row,) = judge("case", {"y": data["x"] * (1 + factor * 1e-5)}, data, evaluate)
        assert row.passed is passes
        assert abs(row.allowed - 2e-5) < 1e-6


def runs_of(length: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a^T b, whose products are added up one after the other, so many at a time."""
    total = torch.zeros(a.shape[1], b.shape[1])
    for begin in range(0, a.shape[0], length):
        run = torch.zeros_like(total)
        for x, y in zip(a[begin : begin + length], b[begin : begin + length], strict=True):
            run += torch.outer(x, y)
        total += run
    return total


@pytest.mark.parametrize(("rows", "longer"), [(100, False), (192, False), (1024, True)])
def test_long_sums_may_err_as_those_of_pytorchs_libraries_do(
    rows: int, longer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain PyTorch's runs are of 192 here: a product whose are of 1,024 errs 2.3 times as much."""
    rng = torch.Generator().manual_seed(5)
    data = {"x": torch.randn(rows, 48, generator=rng), "dy": torch.randn(rows, 48, generator=rng)}
    exact = data["x"].double().t() @ data["dy"].double()
    plain = runs_of(192, data["x"], data["dy"])

    def evaluate(given: Any, exactly: bool) -> Any:
        return {"dw": given["x"].t() @ given["dy"] if exactly else plain}

    (row,) = judge("case", {"dw": runs_of(1024, data["x"], data["dy"])}, data, evaluate)
    assert row.passed
    room = row.rms_allowed - 2 * ((plain - exact).square().mean() / exact.square().mean()).sqrt().item()
    assert room == pytest.approx(torch.finfo(torch.float32).eps * (1 + (math.sqrt(rows) - math.sqrt(192)) / 2 * longer))
    monkeypatch.setattr(compare, "_RUNS", (1024, 1024))
    (row,) = judge("case", {"dw": runs_of(1024, data["x"], data["dy"])}, data, evaluate)
    assert row.passed is not longer


def test_root_mean_square_error_counts() -> None:
    data = {"x": torch.linspace(1.0, 2.0, 1000)}

    def evaluate(given: Any, exact: bool) -> Any:
        y = given["x"].clone()
        if not exact:
            y[0] += 1e-3  # one element of plain PyTorch errs
        return {"y": y}

    (row,) = judge("case", {"y": data["x"] + 5e-4}, data, evaluate)
    assert row.error <= row.allowed and row.rms_error > row.rms_allowed and not row.passed
    assert "root-mean-square" in str(row)


def test_infinities_and_nan_in_the_same_place_are_equal() -> None:
    a = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    assert distance(a, a.double()).largest == 0.0
    assert distance(a, a.flip(0).double()).largest == float("inf")


@pytest.mark.parametrize("turned", [True, False])
def test_what_lies_next_to_a_tie_may_be_rounded_the_other_way(turned: bool) -> None:
    """One of a thousand numbers is a step away: by chance, if exact results can tell so, else wrong."""
    data = {"x": torch.randn(1000, generator=torch.Generator().manual_seed(0))}

    def evaluate(data: Tensors, exact: bool) -> Tensors:
        return {"y": data["x"] * 2.0}

    def stepped(data: Tensors) -> dict[str, torch.Tensor]:
        y = data["x"] * 2.0
        return {"y": torch.cat([y[:1] * 1.125, y[1:]])}

    (row,) = judge("case", stepped(data), data, evaluate, turned=stepped if turned else None)
    assert row.passed == turned


ONCE, BY_SUM = "compute in float32, and round once at the end", "add up many terms by .sum(), not one after another"


@pytest.mark.parametrize(
    ("dtype", "error", "allowed", "words"),
    [("bfloat16", 3e-2, 1e-2, f"this is rounding to bfloat16 if float32 passes, else a wrong formula: {ONCE}"),
     ("float16", 3e-3, 1e-3, f"this is rounding to float16 if float32 passes, else a wrong formula: {ONCE}"),
     ("float32", 2.9e-7, 3e-8, f"this is rounding to float32 if float64 passes, else a wrong formula: {BY_SUM}"),
     ("float64", 3e-13, 1e-13, f"rounding to float64 rather than a wrong formula: {BY_SUM}"),
     ("float64", 1e-7, 1e-13, "rounding to float32 rather than a wrong formula: keep the dtype of the inputs"),
     ("float64", 1e-4, 1e-13, ""), ("float32", 3.1e-7, 3e-8, ""), ("bfloat16", 0.9, 1e-2, ""), ("int64", 2.0, 1.0, ""),
     ("float32", 1e-3, 0.0, "")],
)  # fmt: skip
def test_a_failure_of_the_size_of_rounding_says_so(dtype: str, error: float, allowed: float, words: str) -> None:
    for row in (
        Row("case", "output", error, allowed, dtype=dtype),
        Row("case", "output", rms_error=error, rms_allowed=allowed, dtype=dtype),
    ):
        said = str(row)
        assert f"error {error:.2e} of its scale, allowed {allowed:.2e}" in said and not row.passed
        assert ("rounding to" in said) == bool(words) and words in said
    assert "rounding to" not in str(Row("case", "output", allowed, allowed, dtype=dtype))


def test_rows_name_the_dtype_of_their_tensor() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(4, dtype=dtype)
        (row,) = judge("case", {"y": x}, {"x": x}, lambda data, exact: {"y": data["x"]})
        assert row.dtype == str(dtype).removeprefix("torch.")

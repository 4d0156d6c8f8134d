"""Folding by functions of one's own: what they get, what they give, and that they are tried first."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import states
from te_fuser.quantization.scale_update import scales_of
from te_fuser.recipe import DelayedScaling
from tests.quantization.folded import RECIPE, mean_of, product, recorded, step

LARGEST = torch.finfo(torch.float32).max


def test_functions_of_ones_own() -> None:
    def halved(amax: torch.Tensor, scale: torch.Tensor, most: torch.Tensor, recipe: DelayedScaling) -> torch.Tensor:
        return most / amax / 2

    op = product(DelayedScaling(amax_history_len=2, amax_compute_algo=mean_of, scaling_factor_compute_algo=halved))
    recorded(op, 1.0, 0.0, 4.0)
    state = recorded(op, 3.0)
    assert state.scale.tolist() == [448.0 / 2 / 2, 1.0, 57344.0 / 4 / 2]


def test_functions_get_the_newest_first() -> None:
    found: list[torch.Tensor] = []

    def kept(history: torch.Tensor) -> torch.Tensor:
        found.append(history.clone())
        return history.amax(0)

    op = product(DelayedScaling(amax_history_len=3, amax_compute_algo=kept))
    for amax in (1.0, 2.0, 3.0, 4.0):
        recorded(op, amax)
    assert found[-1][:, 0].tolist() == [4.0, 3.0, 2.0]


@pytest.mark.parametrize("given", [math.nan, 0.0, -1.0])
def test_functions_that_give_no_scale_move_none(given: float) -> None:
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: torch.full_like(scale, given))
    made = scales_of(recipe, torch.ones(2, 3), torch.full((3,), 5.0))
    assert made.tolist() == [5.0] * 3


def test_functions_that_give_infinity() -> None:
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: scale / 0)
    assert scales_of(recipe, torch.ones(2, 3), torch.ones(3)).tolist() == [LARGEST] * 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_what_functions_give_becomes_float32(dtype: torch.dtype) -> None:
    def double(history: torch.Tensor) -> torch.Tensor:
        return history.amax(0).to(dtype)

    def scaled(amax: torch.Tensor, scale: torch.Tensor, most: torch.Tensor, recipe: DelayedScaling) -> torch.Tensor:
        return (most / amax).to(dtype)

    for how in ({"amax_compute_algo": double}, {"scaling_factor_compute_algo": scaled}):
        recipe = DelayedScaling(amax_history_len=2, **how)  # type: ignore[arg-type]
        model = te.Sequential(ops.Linear(16, 16))
        for _ in range(2):
            step(model, torch.randn(4, 16), recipe)
        assert all(t.dtype == torch.float32 for tensors in states(model).values() for t in tensors)


BAD: dict[str, tuple[Any, str]] = {
    "one for all": (lambda: DelayedScaling(amax_compute_algo=lambda h: h.max()), r"amax_compute_algo.*\[\]"),
    "history": (lambda: DelayedScaling(amax_compute_algo=lambda h: h), r"it gave torch.float32 \[1024, 6\]"),
    "nothing": (lambda: DelayedScaling(amax_compute_algo=lambda h: None), "it gave None"),
    "numbers": (lambda: DelayedScaling(amax_compute_algo=lambda h: h.amax(0).long()), "it gave torch.int64"),
    "scale": (
        lambda: DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: scale[:1]),
        r"scaling_factor_compute_algo\(amax, scale, fp8_max, recipe\).*\[1\]",
    ),
    "no argument": (
        lambda: DelayedScaling(amax_compute_algo=lambda: 3),
        r"amax_compute_algo\(history\) raised TypeError: .*takes 0 positional",
    ),
    "error": (
        lambda: DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: 1 / 0),
        r"scaling_factor_compute_algo\(.*\) raised ZeroDivisionError: division by zero",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_functions_are_tried_before_anything_runs(case: str) -> None:
    make, words = BAD[case]
    recipe = make()
    with pytest.raises(ValueError, match=words), te.autocast(recipe=recipe):
        raise AssertionError("it ran")
    op = ops.MatMul(16, 16)
    with te.autocast(recipe=RECIPE), te.autocast(recipe=recipe), pytest.raises(ValueError, match=words):
        op(torch.randn(2, 16))
    with pytest.raises(ValueError, match=words):
        te.precision(te.Sequential(op), {"0": recipe})

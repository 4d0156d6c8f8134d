"""te_fuser.recipe: recipes as data, and regions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser.recipe import DelayedScaling, Format


def test_formats() -> None:
    assert [f.name for f in Format] == ["E4M3", "E5M2", "HYBRID"]
    assert Format.HYBRID.value.fwd == torch.finfo(torch.float8_e4m3fn).max
    assert Format.HYBRID.value.bwd == torch.finfo(torch.float8_e5m2).max
    assert Format.E4M3.value == (448.0, 448.0) and Format.E5M2.value == (57344.0, 57344.0)


def test_delayed_scaling() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.fp8_format, recipe.amax_history_len) == (0, 1, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.reduce_amax) == ("max", None, True)
    assert recipe.override_linear_precision == (False, False, False) and not recipe.fp8_dpa and not recipe.fp8_mha
    other = DelayedScaling(fp8_format=Format.E4M3, amax_history_len=16, amax_compute_algo="most_recent")
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert twin == other != recipe


@pytest.mark.parametrize(
    "region",
    [
        lambda: te.fp8_autocast(),
        lambda: te.fp8_autocast(False, DelayedScaling()),
        lambda: te.fp8_autocast(False, DelayedScaling(), None),
        lambda: te.fp8_autocast(enabled=False, calibrating=False, fp8_recipe=DelayedScaling(), fp8_group=None),
        lambda: te.autocast(enabled=False, recipe=DelayedScaling(), amax_reduction_group=None),
    ],
)
def test_regions_that_are_off(region: Any) -> None:
    layer, x = te.Linear(4, 4, device="cpu"), torch.randn(2, 4)
    with region():
        y = layer(x)
    assert torch.equal(y, layer(x)) and torch.equal(region()(layer)(x), y)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: te.fp8_autocast(False, False, "delayed"), "takes a recipe of te_fuser.recipe.* got 'delayed'"),
        (lambda: te.fp8_autocast("on"), "enabled is True or False, got 'on'"),
        (lambda: te.autocast(False, recipe=DelayedScaling), "takes a recipe"),
    ],
)
def test_bad_arguments(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()

"""Recipes: values that are checked when they are made."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser.ops.blockwise_scaling import dequantized
from te_fuser.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    MMParams,
    MXFP8BlockScaling,
    OwnScales,
    QParams,
    Recipe,
)

FAST, SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
KINDS = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)


def test_formats() -> None:
    assert [f.name for f in Format] == ["E4M3", "E5M2", "HYBRID"]
    assert Format.HYBRID.value.max_fwd == torch.finfo(torch.float8_e4m3fn).max
    assert Format.HYBRID.value.max_bwd == torch.finfo(torch.float8_e5m2).max
    assert {*Format.E5M2.value._asdict()} == {"max_fwd", "max_bwd"}
    assert Format.E4M3.value == (448.0, 448.0) and Format.E5M2.value == (57344.0, 57344.0)


def test_delayed_scaling() -> None:
    recipe = DelayedScaling()
    assert (recipe.margin, recipe.interval, recipe.fp8_format, recipe.amax_history_len) == (0, 1, Format.HYBRID, 1024)
    assert (recipe.amax_compute_algo, recipe.scaling_factor_compute_algo, recipe.reduce_amax) == ("max", None, True)
    assert recipe.override_linear_precision == (False, False, False) and not recipe.fp8_dpa and not recipe.fp8_mha
    other = DelayedScaling(1, 1, Format.E4M3, 16, "most_recent", None, False, (False, True, False))  # by position
    assert other.amax_compute_algo == "most_recent" and other.override_linear_precision == (False, True, False)
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert twin == other != recipe and hash(twin) == hash(other)


def test_products_are_summed_fast_forward_and_split_for_gradients() -> None:
    for kind in (DelayedScaling, Float8CurrentScaling):
        recipe = kind()
        assert (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad) == (FAST, SPLIT, SPLIT)
        assert kind(fp8_gemm_fprop=SPLIT).fp8_gemm_fprop == SPLIT
    for kind in (Float8BlockScaling, MXFP8BlockScaling):
        recipe = kind()
        assert (recipe.fp8_gemm_fprop, recipe.fp8_gemm_dgrad, recipe.fp8_gemm_wgrad) == (SPLIT, SPLIT, SPLIT)
        assert all(f.kw_only for f in fields(recipe) if f.name.startswith("fp8_gemm"))


def test_recipes_without_history() -> None:
    assert Float8CurrentScaling().fp8_format == Format.HYBRID
    assert Float8CurrentScaling().fp8_quant_fwd_inp == QParams(power_2_scale=False, amax_epsilon=0.0)
    blocks = Float8BlockScaling()
    assert (blocks.x_block_scaling_dim, blocks.w_block_scaling_dim, blocks.grad_block_scaling_dim) == (1, 2, 1)
    assert MMParams() == SPLIT and blocks.fp8_format == Format.E4M3 and blocks.fp8_quant_bwd_grad.power_2_scale
    assert MXFP8BlockScaling().margin == 0 and MXFP8BlockScaling().fp8_format == Format.E4M3
    assert all(issubclass(kind, Recipe) and kind() == kind() for kind in KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_cannot_be_changed(kind: Any) -> None:
    with pytest.raises(AttributeError):
        kind().fp8_format = Format.E4M3


BAD: dict[str, tuple[Any, type[Exception], str]] = {
    "e5m2": (lambda: DelayedScaling(fp8_format=Format.E5M2), ValueError, "Format.E5M2.*it takes Format.HYBRID or"),
    "by newer positions": (lambda: DelayedScaling(0, Format.HYBRID), TypeError, "behind margin by name"),
    "no format": (lambda: DelayedScaling(fp8_format="HYBRID"), TypeError, "te_fuser.recipe.Format"),
    "algorithm": (lambda: DelayedScaling(amax_compute_algo="mean"), ValueError, 'mean.*"max", "most_recent"'),
    "no algorithm": (lambda: DelayedScaling(amax_compute_algo=None), ValueError, "amax_compute_algo=None"),
    "own scale": (lambda: DelayedScaling(scaling_factor_compute_algo="max"), TypeError, "a function or None"),
    "length": (lambda: DelayedScaling(amax_history_len=0), ValueError, "amax_history_len=0.*1 or more"),
    "no length": (lambda: DelayedScaling(amax_history_len=2.0), TypeError, "amax_history_len=2.0.*whole number"),
    "flag for length": (lambda: DelayedScaling(amax_history_len=True), TypeError, "amax_history_len=True"),
    "margin": (lambda: DelayedScaling(margin=0.5), TypeError, "margin=0.5.*whole number"),
    "large margin": (lambda: DelayedScaling(margin=127), ValueError, "margin=127.*-126 to 126"),
    "reduce": (lambda: DelayedScaling(reduce_amax=1), TypeError, "reduce_amax=1.*True or False"),
    "override": (lambda: DelayedScaling(override_linear_precision=(True,)), TypeError, "three times True or False"),
    "override flag": (lambda: DelayedScaling(override_linear_precision=True), TypeError, "three times True or False"),
    "dpa": (lambda: DelayedScaling(fp8_dpa=True), NotImplementedError, "fp8_dpa=True.*no attention in FP8"),
    "mha": (lambda: Float8CurrentScaling(fp8_mha=True), NotImplementedError, "fp8_mha=True"),
    "dpa of another type": (lambda: DelayedScaling(fp8_dpa="yes"), TypeError, "fp8_dpa='yes'.*True or False"),
    "gemm": (lambda: DelayedScaling(fp8_gemm_fprop=True), TypeError, "fp8_gemm_fprop=True.*MMParams"),
    "split": (lambda: MMParams(use_split_accumulator=0), TypeError, "use_split_accumulator=0"),
    "quantized": (lambda: Float8CurrentScaling(fp8_quant_fwd_inp=0.0), TypeError, "fp8_quant_fwd_inp=0.0.*QParams"),
    "epsilon": (lambda: QParams(amax_epsilon=-1.0), ValueError, "amax_epsilon=-1.0.*from 0 on"),
    "epsilon of no number": (lambda: QParams(amax_epsilon=1e39), ValueError, "amax_epsilon=1e.39.*that float32 has"),
    "power": (lambda: QParams(power_2_scale="no"), TypeError, "power_2_scale='no'"),
    "current in e5m2": (lambda: Float8CurrentScaling(fp8_format=Format.E5M2), ValueError, "E5M2"),
    "blocks in hybrid": (lambda: Float8BlockScaling(fp8_format=Format.HYBRID), ValueError, "it takes Format.E4M3"),
    "blocks of x": (lambda: Float8BlockScaling(x_block_scaling_dim=2), ValueError, "x_block_scaling_dim=2.*1 x 128"),
    "blocks by tensor": (lambda: Float8BlockScaling(x_block_scaling_dim=torch.ones(2)), ValueError, "leave it out"),
    "mx margin by tensor": (lambda: MXFP8BlockScaling(margin=torch.ones(2)), ValueError, "leave it out"),
    "blocks fast": (lambda: Float8BlockScaling(fp8_gemm_fprop=FAST), ValueError, "sums over blocks are split"),
    "mx margin": (lambda: MXFP8BlockScaling(margin=1), ValueError, "margin=1"),
    "mx hybrid": (lambda: MXFP8BlockScaling(fp8_format=Format.HYBRID), ValueError, "it takes Format.E4M3"),
    "unknown": (lambda: DelayedScaling(amax_history_length=16), TypeError, "amax_history_length"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_recipes(case: str) -> None:
    make, error, words = BAD[case]
    with pytest.raises(error, match=words):
        make()


@dataclass(frozen=True)
class _RowsOf64(Recipe):
    """A recipe that only a user has."""

    step = 64

    @property
    def own_scales(self) -> tuple[OwnScales, OwnScales, OwnScales]:
        return (OwnScales(QParams(power_2_scale=True), (1, 64)),) * 3


class _Own(DelayedScaling):
    """A kind of another one."""


ASKED = ["delayed", "float8_current_scaling", "float8_per_tensor_scaling", "float8_block_scaling", "mxfp8"]
SAID: dict[type[Recipe], set[str]] = {
    DelayedScaling: {"delayed", "float8_per_tensor_scaling"},
    _Own: {"delayed", "float8_per_tensor_scaling"},
    Float8CurrentScaling: {"float8_current_scaling", "float8_per_tensor_scaling"},
    Float8BlockScaling: {"float8_block_scaling"},
    MXFP8BlockScaling: {"mxfp8"},
    _RowsOf64: {"custom"},
}


@pytest.mark.parametrize("kind", SAID)
def test_recipes_and_their_classes_say_which_they_are(kind: type[Recipe]) -> None:
    for asked in (kind, kind()):
        assert {name for name in [*ASKED, "nvfp4", "custom"] if getattr(asked, name)()} == SAID[kind]


def test_a_recipe_of_ones_own_says_all_that_regions_ask() -> None:
    linear, x = te.Linear(128, 64, bias=False), torch.randn(6, 128)
    with te.autocast(recipe=_RowsOf64()):
        y = linear(x)
        assert "E4M3; a scale for each 1 x 64 numbers" in str(linear.explain(x, details=True))
    y.sum().backward()
    rows = OwnScales(QParams(power_2_scale=True), (1, 64))
    x8, weight = (dequantized(t.detach(), torch.float8_e4m3fn, rows) for t in (x, linear.weight))
    torch.testing.assert_close(y, x8 @ weight.T)
    turned = dequantized(x.T, torch.float8_e4m3fn, rows)
    torch.testing.assert_close(linear.weight.grad, turned.sum(1).expand(64, 128))  # ones have no error in 8 bits


OWN = OwnScales(QParams(), (1, 64))


@pytest.mark.parametrize("given", [3, [OWN] * 3, (OWN, OWN), (OWN, OWN, 1), (OWN, OWN, OwnScales(QParams(), (1, 0)))])
def test_scales_that_are_none_are_refused_where_a_region_is_entered(given: Any) -> None:
    class Odd(Recipe):
        own_scales = given

    with pytest.raises(TypeError, match=r"^Odd: own_scales are three OwnScales.*, got "), te.autocast(recipe=Odd()):
        pass
    with pytest.raises(TypeError, match=r"^Odd: own_scales are three"):
        te.precision(te.Linear(64, 64), {"*": Odd()})


def test_a_recipe_that_says_nothing_of_scales_is_none() -> None:
    with pytest.raises(TypeError, match="own_scales"):
        Recipe()  # type: ignore[abstract]

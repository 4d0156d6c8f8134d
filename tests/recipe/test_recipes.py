"""Recipes, checked when they are made; regions: which one is on, where, and who is called at its entry."""

from __future__ import annotations

import contextvars
import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
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
    region,
)
from tests.refused import raises, refusals
from tests.threads import in_threads

FAST, SPLIT = MMParams(use_split_accumulator=False), MMParams(use_split_accumulator=True)
KINDS = (DelayedScaling, Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)


def test_formats_and_delayed_scaling() -> None:
    """Defaults of all recipes stand in public.txt."""
    other = DelayedScaling(1, 1, Format.E4M3, 16, "most_recent", None, False, (False, True, False))  # by position
    assert other.amax_compute_algo == "most_recent" and other.override_linear_precision == (False, True, False)
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert twin == other != DelayedScaling() and hash(twin) == hash(other)
    assert [f.name for f in Format] == ["E4M3", "E5M2", "HYBRID"]
    assert Format.HYBRID.value.max_fwd == torch.finfo(torch.float8_e4m3fn).max
    assert Format.HYBRID.value.max_bwd == torch.finfo(torch.float8_e5m2).max
    assert {*Format.E5M2.value._asdict()} == {"max_fwd", "max_bwd"}
    assert Format.E4M3.value == (448.0, 448.0) and Format.E5M2.value == (57344.0, 57344.0)


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_cannot_be_changed(kind: Any) -> None:
    assert isinstance(kind(), Recipe) and kind() == kind()
    with pytest.raises(AttributeError):
        kind().fp8_format = Format.E4M3
    with pytest.raises(TypeError, match="own_scales"):
        Recipe()  # type: ignore[abstract]


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


test_bad_recipes = refusals(BAD)


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
    raises(TypeError, r"^Odd: own_scales are three", te.precision, te.Linear(64, 64), {"*": Odd()})


RECIPE, OTHER = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=8)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[region.Region]]:
    """The regions that were entered from outside of all."""
    found: list[region.Region] = []
    monkeypatch.setattr(region, "_callbacks", [found.append])
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    "off",
    [
        lambda: te.fp8_autocast(),
        lambda: te.fp8_autocast(False, DelayedScaling()),
        lambda: te.fp8_autocast(False, DelayedScaling(), None),
        lambda: te.fp8_autocast(enabled=False, calibrating=False, fp8_recipe=DelayedScaling(), fp8_group=None),
        lambda: te.autocast(enabled=False, recipe=DelayedScaling(), amax_reduction_group=None),
        lambda: te.autocast(enabled=False, recipe=MXFP8BlockScaling()),
    ],
)
def test_regions_that_are_off(off: Any) -> None:
    layer, x = te.Linear(16, 16, device="cpu"), torch.randn(2, 16)
    with off():
        assert region.current() is None
        y = layer(x)
    assert torch.equal(y, layer(x)) and torch.equal(off()(layer)(x), y)


@pytest.mark.parametrize(
    ("on", "calibrating"),
    [
        (lambda: te.fp8_autocast(True, False, RECIPE, None), False),
        (lambda: te.fp8_autocast(True, RECIPE), False),
        (lambda: te.fp8_autocast(enabled=True, fp8_recipe=RECIPE), False),
        (lambda: te.fp8_autocast(calibrating=True, fp8_recipe=RECIPE), True),
        (lambda: te.fp8_autocast(True, True, RECIPE), False),  # who is to quantize does not calibrate alone
        (lambda: te.autocast(True, False, RECIPE, None), False),
        (lambda: te.autocast(recipe=RECIPE), False),
        (lambda: te.autocast(False, True, RECIPE), True),
    ],
)
def test_regions_that_are_on(on: Any, calibrating: bool) -> None:
    with on():
        assert region.current() == region.Region(RECIPE, None, calibrating)
    assert region.current() is None


def test_the_inner_region_holds(calls: list[region.Region]) -> None:
    with te.autocast(recipe=RECIPE):
        with te.autocast(enabled=False):
            assert region.current() is None and region.current_key() is None
            with te.autocast(recipe=OTHER):
                assert region.current() == region.Region(OTHER)
        assert region.current() == region.Region(RECIPE)
    assert calls == [region.Region(RECIPE)]
    with te.autocast(enabled=False), te.autocast(recipe=OTHER):
        assert calls[1:] == [region.Region(OTHER)]
    with te.autocast():
        assert region.current() == region.Region(DelayedScaling())


def test_a_region_may_be_entered_again_and_again(calls: list[region.Region]) -> None:
    on = te.autocast(recipe=RECIPE)
    with on, on, on:
        assert region.entered() == (on.region,) * 3
    numbers = set()
    for _ in range(3):
        with on:
            numbers.add(region.entries())
    assert len(numbers) == 3 and len(calls) == 4 and region.entered() == ()


def test_regions_decorate_functions_and_can_be_pickled() -> None:
    @te.fp8_autocast(enabled=True, fp8_recipe=RECIPE)
    def run(depth: int) -> Any:
        return region.entered() if depth == 0 else run(depth - 1)

    assert run(2) == (region.Region(RECIPE),) * 3 and region.current() is None
    twin = pickle.loads(pickle.dumps(te.autocast(recipe=RECIPE)))
    assert twin.region == region.Region(RECIPE)


def test_errors_other_threads_and_contexts_are_in_no_region() -> None:
    with te.autocast(recipe=RECIPE):
        found = [*in_threads(region.current), contextvars.Context().run(region.current)]
        assert region.current() is not None
    assert found == [None, None]
    with pytest.raises(RuntimeError, match="inside"), te.autocast(recipe=RECIPE):
        raise RuntimeError("inside")
    assert region.current() is None


def test_keys_are_all_that_plans_depend_on() -> None:
    def key(**how: Any) -> Any:
        with te.autocast(**how):
            return region.current_key()

    assert key(recipe=RECIPE) == key(recipe=DelayedScaling(amax_history_len=4)) != key(recipe=OTHER)
    assert key(recipe=RECIPE) != key(enabled=False, calibrating=True, recipe=RECIPE)
    before = key(recipe=RECIPE)
    region.settings_changed()
    assert key(recipe=RECIPE) != before and len({before, key(recipe=RECIPE)}) == 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: te.fp8_autocast(False, False, "delayed"), "te_fuser.recipe as fp8_recipe.* got 'delayed'"),
        (lambda: te.fp8_autocast("on"), "enabled is True or False, got 'on'"),
        (lambda: te.autocast(False, recipe=DelayedScaling), "as recipe"),
        (lambda: te.autocast(True, calibrating=1), "calibrating is True or False, got 1"),
        (lambda: te.fp8_autocast(True, fp8_group="world"), "takes a group .* as fp8_group, got 'world'"),
        (lambda: te.fp8_autocast(False, DelayedScaling(), 3), "takes a group"),
        (lambda: te.autocast(amax_reduction_group=3), "as amax_reduction_group, got 3"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Any, words: str) -> None:
    raises(TypeError, words, call)


@pytest.mark.parametrize("given", [3, None, torch.ones(2)])
def test_what_is_no_function_is_not_decorated(given: Any) -> None:
    with pytest.raises(TypeError, match=r"a region decorates a function, got .*: write @autocast"):
        te.autocast(recipe=RECIPE)(given)


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return dy


def test_what_runs_again_has_its_regions_and_backwards_enter_none(calls: list[region.Region]) -> None:
    with te.autocast(recipe=RECIPE):
        stack = region.entered()
    calls.clear()
    with region.recomputed(stack):
        assert region.current() == region.Region(RECIPE) and region.recomputing()
        with te.autocast(recipe=OTHER):
            assert region.current() == region.Region(OTHER)
    with region.recomputed(()), te.autocast(recipe=OTHER):
        assert region.current() == region.Region(OTHER)
    assert calls == [] and not region.recomputing() and region.current() is None
    x = torch.ones(1, requires_grad=True)
    raises(RuntimeError, "inside of a backward.*checkpoint_contexts", lambda: InBackward.apply(x).backward())
    with te.autocast(recipe=RECIPE):
        InBackward.apply(x).backward()  # it is inside of another one
    assert len(calls) == 1


def _generator() -> Iterator[int]:
    yield 1


async def _coroutine() -> None: ...


async def _async_generator() -> Any:
    yield 1


class _Class: ...


@pytest.mark.parametrize("what", [_generator, _coroutine, _async_generator, _Class])
def test_what_would_run_outside_of_its_region_is_not_decorated(what: Any) -> None:
    with pytest.raises(TypeError, match=r"which would run outside of it: write `with autocast\(\.\.\):` inside"):
        te.autocast(recipe=RECIPE)(what)

"""Regions: which one is on, where, and who is called at its entry."""

from __future__ import annotations

import contextvars
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser.recipe import DelayedScaling, MXFP8BlockScaling, region

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


def test_a_region_without_a_recipe_has_delayed_scaling() -> None:
    with te.autocast():
        assert region.current() == region.Region(DelayedScaling())


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


def test_a_region_may_be_entered_again_and_again(calls: list[region.Region]) -> None:
    on = te.autocast(recipe=RECIPE)
    with on, on, on:
        assert region.entered() == (on.region,) * 3
    numbers = set()
    for _ in range(3):
        with on:
            numbers.add(region.entries())
    assert len(numbers) == 3 and len(calls) == 4 and region.entered() == ()


def test_a_decorated_function_runs_in_a_region() -> None:
    @te.fp8_autocast(enabled=True, fp8_recipe=RECIPE)
    def run(depth: int) -> Any:
        return region.entered() if depth == 0 else run(depth - 1)

    assert run(2) == (region.Region(RECIPE),) * 3 and region.current() is None


def test_an_error_leaves_the_region() -> None:
    with pytest.raises(RuntimeError, match="inside"), te.autocast(recipe=RECIPE):
        raise RuntimeError("inside")
    assert region.current() is None


def test_other_threads_and_contexts_are_in_no_region() -> None:
    found: list[Any] = []
    with te.autocast(recipe=RECIPE):
        thread = threading.Thread(target=lambda: found.append(region.current()))
        thread.start()
        thread.join()
        found.append(contextvars.Context().run(region.current))
        assert region.current() is not None
    assert found == [None, None]


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
        (
            lambda: te.fp8_autocast(False, False, "delayed"),
            "te_fuser.recipe as fp8_recipe.* got 'delayed'",
        ),
        (lambda: te.fp8_autocast("on"), "enabled is True or False, got 'on'"),
        (lambda: te.autocast(False, recipe=DelayedScaling), "as recipe"),
        (lambda: te.autocast(True, calibrating=1), "calibrating is True or False, got 1"),
        (
            lambda: te.fp8_autocast(True, fp8_group="world"),
            "takes a group .* as fp8_group, got 'world'",
        ),
        (lambda: te.fp8_autocast(False, DelayedScaling(), 3), "takes a group"),
        (lambda: te.autocast(amax_reduction_group=3), "as amax_reduction_group, got 3"),
    ],
)
def test_bad_arguments(call: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        call()


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


def test_a_region_is_not_entered_inside_of_a_backward(calls: list[region.Region]) -> None:
    x = torch.ones(1, requires_grad=True)
    with pytest.raises(RuntimeError, match="inside of a backward.*checkpoint_contexts"):
        InBackward.apply(x).backward()
    with te.autocast(recipe=RECIPE):
        InBackward.apply(x).backward()  # it is inside of another one
    assert len(calls) == 1


def test_what_runs_again_has_its_regions(calls: list[region.Region]) -> None:
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


def test_regions_can_be_pickled() -> None:
    twin = pickle.loads(pickle.dumps(te.autocast(recipe=RECIPE)))
    assert twin.region == region.Region(RECIPE)


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

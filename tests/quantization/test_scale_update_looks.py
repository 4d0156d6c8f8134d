"""Looks between backwards of one region: an entry of a history is that region's, whoever looks meanwhile."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import not_finite, states
from te_fuser.recipe import DelayedScaling

RECIPE = DelayedScaling(amax_history_len=3)


LOOKS: dict[str, Any] = {
    "states": states,
    "not_finite": not_finite,
    "state_dict": torch.nn.Module.state_dict,
    "copy": copy.deepcopy,
    "evaluation": lambda model: evaluated(model),
}


def evaluated(model: Any) -> None:
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        model(torch.ones(4, 16))


def looked_at(look: Any, recipe: DelayedScaling, factors: list[list[float]]) -> list[torch.Tensor]:
    """Histories and scales after steps, each a region with a backward for each factor; `look` between these."""
    torch.manual_seed(0)
    model, x = te.Sequential(ops.MatMul(16, 16), ops.GELU(), ops.Linear(16, 16)), torch.randn(4, 16)
    for step, of_step in enumerate(factors):
        with te.autocast(recipe=recipe):
            calls = [model((1.0 + step) * x) for _ in of_step]
        for y, factor in zip(calls, of_step, strict=True):
            y.backward(torch.full_like(y, factor))
            if look is not None:
                look(model)
    with te.autocast(recipe=recipe):
        pass
    return [t for pair in states(model).values() for t in pair]


GROWING = [[1.0, 8.0, 2.0], [4.0, 0.5], [2.0, 16.0]]
BEHIND = {
    "max": RECIPE,
    "newest": DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent"),
    "one": DelayedScaling(amax_history_len=1),
    "of scales before": DelayedScaling(
        amax_history_len=3, scaling_factor_compute_algo=lambda amax, scale, most, recipe: (scale + most / amax) / 2.0
    ),
}


@pytest.mark.parametrize("recipe", BEHIND)
@pytest.mark.parametrize("look", LOOKS)
def test_looks_between_backwards_split_no_entry(look: str, recipe: str) -> None:
    """An entry of a history is a region's: what comes behind a look raises it, and scales are as if nobody looked."""
    found, want = (looked_at(how, BEHIND[recipe], GROWING) for how in (LOOKS[look], None))
    assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("first", [math.inf, math.nan])
def test_overflows_before_and_behind_a_look(first: float) -> None:
    """Each fold that finds one counts. What is behind the first of a region moves nothing; what is before it has."""
    torch.manual_seed(0)
    model, x = te.Sequential(ops.MatMul(16, 16)), torch.randn(4, 16)
    counts = []
    for factor in (first, 2.0, first):
        with te.autocast(recipe=RECIPE):
            calls = [model(x), model(x)]
        for y, f in zip(calls, (factor, 3.0 - factor if math.isfinite(factor) else 1.0), strict=True):
            y.backward(torch.full_like(y, f))
            counts.append(not_finite(model).get("0.output_gradient", 0))
    assert counts == [1, 1, 1, 1, 2, 2]
    assert states(model)["0.output_gradient"][1].tolist() == [2.0, 0.0, 0.0]


def test_what_was_loaded_after_a_look_is_another_history() -> None:
    model, x = te.Sequential(ops.MatMul(16, 16)), torch.randn(4, 16)
    with te.autocast(recipe=RECIPE):
        calls = [model(x), model(x)]
    calls[0].backward(torch.ones(4, 16))
    saved = {name: t.clone() for name, t in model.state_dict().items()}
    saved["0.fp8_amax_history"][:, 2] = torch.tensor([5.0, 6.0, 7.0])
    model.load_state_dict(saved)
    calls[1].backward(torch.full((4, 16), 9.0))
    assert states(model)["0.output_gradient"][1].tolist() == [9.0, 5.0, 6.0]

"""States of a model, by path; looks between backwards, which split no entry; folding by functions of one's own."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import not_finite, states
from te_fuser.quantization.scale_update import scales_of
from te_fuser.quantization.state import ROLES
from te_fuser.recipe import DelayedScaling
from tests.quantization.folded import RECIPE, mean_of, product, recorded, step
from tests.refused import raises


def test_paths_of_lists_and_presets() -> None:
    model = torch.nn.ModuleDict(
        {
            "first": te.Sequential(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)),
            "mlp": te.LayerNormMLP(16, 32),
            "head": te.Linear(16, 48),
            "odd": te.Sequential(ops.Linear(16, 10)),  # which no product of 8 bits takes
            "idle": te.Linear(16, 16),
        }
    )
    x = torch.randn(4, 16)
    with te.autocast(recipe=RECIPE):
        sum(model[name](x).sum() for name in ("first", "mlp", "head", "odd")).backward()
    paths = ("first.1", "first.3", "mlp.fc1", "mlp.fc2", "head")
    found = states(model)
    assert [*found] == [f"{path}.{role}" for path in paths for role in ROLES]
    for scale, history in found.values():
        assert scale.shape == () and history.shape == (3,) and scale.dtype == history.dtype == torch.float32
        assert float(history[0]) > 0 == float(history[1])
    assert torch.equal(found["head.weight"].amax_history[0], model["head"].weight.abs().max())
    assert torch.equal(found["mlp.fc2.weight"].scale, torch.tensor(448.0) / model["mlp"].fc2_weight.abs().max())
    layer, x = te.TransformerLayer(32, 64, 2), torch.randn(3, 2, 32)
    with te.autocast(recipe=RECIPE):
        layer(x).sum().backward()
    paths = {name.rpartition(".")[0] for name in states(layer)}
    assert len(paths) == 4 and {"layernorm_mlp.fc1", "layernorm_mlp.fc2"} < paths


def test_an_overflow_that_gradients_do_not_show_is_counted() -> None:
    """Infinities saturate; each fold that finds one counts, and what was counted once is not again."""
    model, x = te.Sequential(ops.Linear(16, 32, bias=False), ops.GELU(), ops.MatMul(32, 16)), torch.randn(4, 16)
    counts = []
    for factor in (1.0, float("inf"), 1.0):
        model.zero_grad()
        with te.autocast(recipe=RECIPE):
            y = model(x)
        y.backward(torch.full_like(y, factor))
        assert all(p.grad.isfinite().all() for p in model.parameters())
        counts.append(not_finite(model))
    assert counts == [{}, {"2.output_gradient": 1}, {"2.output_gradient": 1}]


@pytest.mark.parametrize("look", [states, copy.deepcopy, pickle.dumps, torch.nn.Module.state_dict])
def test_who_looks_inside_of_a_region_changes_nothing(look: Callable[[Any], Any]) -> None:
    def run(look: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, x = te.Linear(16, 32), torch.randn(4, 16)
        with te.autocast(recipe=RECIPE):
            model(x).sum().backward()
            look(model)
            y = model(3.0 * x)
            hook = y.register_hook(lambda _: look(model) and None)
            y.square().sum().backward()
            hook.remove()
        assert model.weight.grad is not None
        return [y, model.weight.grad, *(t for both in states(model).values() for t in both)]

    for found, want in zip(run(look), run(lambda model: None), strict=True):
        assert torch.equal(found, want)


def test_states_inside_of_a_region_are_those_of_its_entry() -> None:
    model, x = te.Linear(16, 32), torch.randn(4, 16)
    for factor in (1.0, 2.0):
        with te.autocast(recipe=RECIPE):
            model(factor * x)
            scale, history = states(model)["input"]
    assert float(history[0]) == float(x.abs().max()) and torch.equal(scale, torch.tensor(448.0) / history[0])
    assert float(states(model)["input"][1][0]) == 2.0 * float(x.abs().max())


def test_a_product_by_itself_has_no_path_and_counts_are_asked_outside_of_regions() -> None:
    """As its parameters have none."""
    model = te.Linear(16, 32)
    with te.autocast(recipe=RECIPE):
        y = model(torch.randn(4, 16))
    y.backward(torch.full_like(y, float("inf")))
    assert [*states(model)] == [*ROLES] and not_finite(model) == {"output_gradient": 1}
    with te.autocast(recipe=RECIPE), pytest.raises(RuntimeError, match="ask outside, and before the step"):
        not_finite(model)


@pytest.mark.parametrize("given", [3, None, torch.ones(2), [te.Linear(16, 32)]])
@pytest.mark.parametrize("function", [states, not_finite])
def test_models_are_modules(function: Callable[[Any], Any], given: Any) -> None:
    words = rf"quantization\.{function.__name__} takes the model .*, got {type(given).__name__}: give"
    raises(TypeError, words, function, given)


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
    for number, of_step in enumerate(factors):
        with te.autocast(recipe=recipe):
            calls = [model((1.0 + number) * x) for _ in of_step]
        for y, factor in zip(calls, of_step, strict=True):
            y.backward(torch.full_like(y, factor))
            if look is not None:
                look(model)
    with te.autocast(recipe=recipe):
        pass
    return [t for pair in states(model).values() for t in pair]


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
    factors = [[1.0, 8.0, 2.0], [4.0, 0.5], [2.0, 16.0]]
    found, want = (looked_at(how, BEHIND[recipe], factors) for how in (LOOKS[look], None))
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


def test_functions_of_ones_own_get_the_newest_first() -> None:
    found: list[torch.Tensor] = []

    def kept(history: torch.Tensor) -> torch.Tensor:
        found.append(history.clone())
        return history.amax(0)

    op = product(DelayedScaling(amax_history_len=3, amax_compute_algo=kept))
    for amax in (1.0, 2.0, 3.0, 4.0):
        recorded(op, amax)
    assert found[-1][:, 0].tolist() == [4.0, 3.0, 2.0]

    def halved(amax: torch.Tensor, scale: torch.Tensor, most: torch.Tensor, recipe: DelayedScaling) -> torch.Tensor:
        return most / amax / 2

    op = product(DelayedScaling(amax_history_len=2, amax_compute_algo=mean_of, scaling_factor_compute_algo=halved))
    recorded(op, 1.0, 0.0, 4.0)
    state = recorded(op, 3.0)
    assert state.scale.tolist() == [448.0 / 2 / 2, 1.0, 57344.0 / 4 / 2]


@pytest.mark.parametrize(
    ("given", "wanted"), [(math.nan, 5.0), (0.0, 5.0), (-1.0, 5.0), (math.inf, torch.finfo(torch.float32).max)]
)
def test_functions_that_give_no_scale_move_none_and_infinity_the_largest(given: float, wanted: float) -> None:
    recipe = DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: torch.full_like(scale, given))
    made = scales_of(recipe, torch.ones(2, 3), torch.full((3,), 5.0))
    assert made.tolist() == [wanted] * 3


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
    "scale": (lambda: DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: scale[:1]),
     r"scaling_factor_compute_algo\(amax, scale, fp8_max, recipe\).*\[1\]"),
    "no argument": (lambda: DelayedScaling(amax_compute_algo=lambda: 3),
     r"amax_compute_algo\(history\) raised TypeError: .*takes 0 positional"),
    "error": (lambda: DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, most, recipe: 1 / 0),
     r"scaling_factor_compute_algo\(.*\) raised ZeroDivisionError: division by zero"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_functions_are_tried_before_anything_runs(case: str) -> None:
    make, words = BAD[case]
    recipe = make()
    with pytest.raises(ValueError, match=words), te.autocast(recipe=recipe):
        raise AssertionError("it ran")
    op = ops.MatMul(16, 16)
    with te.autocast(recipe=RECIPE), te.autocast(recipe=recipe), pytest.raises(ValueError, match=words):
        op(torch.randn(2, 16))
    raises(ValueError, words, te.precision, te.Sequential(op), {"0": recipe})

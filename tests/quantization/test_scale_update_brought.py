"""Amaxes that no region has folded when a model is saved or copied: they come along, and the next region folds them.

So is what is saved inside of a region, and on one of several ranks (`tests/parallel/test_amax_allreduce.py`).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import te_fuser as te
from te_fuser import ops
from te_fuser.params.scales import RECORDED, States
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling

F = 32
RECIPE = DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")
MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: te.Sequential(ops.Linear(F, F), ops.GELU(), ops.MatMul(F, F)),
    "preset": lambda: te.LayerNormMLP(F, 2 * F),
    "joined": lambda: te.Linear(F, 3 * F, parameters_split=("q_", "k_", "v_")),
    "torch.nn": lambda: Bound(),
}


class Bound(te.Sequential):
    """A list that reads the weight of a module of torch.nn's."""

    def __init__(self) -> None:
        linear = torch.nn.Linear(F, F, bias=False)
        super().__init__(ops.Bound(ops.MatMul(F, F, device="meta"), linear, weight="weight"), ops.MatMul(F, F))
        self.linear = linear


def made(name: str = "list") -> Any:
    torch.manual_seed(0)
    return MODELS[name]()


def step(model: Any, factor: float, look: Callable[[Any], Any] | None = None) -> tuple[torch.Tensor, Any]:
    """y, and what somebody sees inside of the region, behind the backward."""
    with te.autocast(recipe=RECIPE):
        y = model(factor * torch.linspace(-1.0, 1.0, 8 * F).view(8, F))
        (factor * y).sum().backward()
        return y.detach(), None if look is None else look(model)


def evaluated(model: Any) -> torch.Tensor:
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        return model(torch.linspace(-1.0, 1.0, 8 * F).view(8, F))  # type: ignore[no-any-return]


def flat(model: Any) -> list[torch.Tensor]:
    return [t for both in states(model).values() for t in both]


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def loaded(saved: Any, name: str = "list", **how: Any) -> Any:
    model = made(name)
    states(model)  # so that a module of torch.nn's knows scales
    model.load_state_dict(saved, **how)
    return model


def saved_in_a_region(name: str = "list", times: int = 2) -> tuple[Any, Any]:
    """A model, and what it saved in the region of its last step, whose amaxes are in no history there."""
    model = made(name)
    for k in range(times - 1):
        step(model, 2.0 + k)
    saved = step(model, 5.0, lambda m: copy.deepcopy(m.state_dict()))[1]
    return model, saved


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "saved": lambda m, name: loaded(copy.deepcopy(m.state_dict()), name),
    "copied": lambda m, name: copy.deepcopy(m),
    "pickled": lambda m, name: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_taken_inside_of_a_region_goes_on_as_the_model_does(name: str, way: str) -> None:
    model = made(name)
    step(model, 2.0)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    twin = step(model, 5.0, lambda m: WAYS[way](m, name))[1]
    found = {key: t for key, t in twin.state_dict().items() if "fp8" in key}
    assert found and all(torch.equal(t, before[key]) for key, t in found.items())  # as calls in the region have it
    for factor in (3.0, 1.0):
        assert torch.equal(step(twin, factor)[0], step(model, factor)[0])
    assert same(flat(twin), flat(model))


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_has_it_and_trains_on(name: str) -> None:
    """Evaluation folds the saved amaxes as a step of their own, which the next step does not raise."""
    model, saved = saved_in_a_region(name)
    twin = loaded(saved, name)
    for m in (model, twin):
        evaluated(m)
    assert torch.equal(evaluated(twin), evaluated(model)) and same(flat(twin), flat(model))
    for factor in (9.0, 1.0):
        step(model, factor)
        step(twin, factor)
    assert same(flat(twin), flat(model))


def test_weights_in_8_bits_alone_keep_their_scale() -> None:
    model, saved = saved_in_a_region("preset")
    with te.quantized_model_init():
        narrow = made("preset")
    narrow.load_state_dict(saved)
    weights = {name: s.scale for name, s in states(narrow).items() if name.endswith("weight")}
    found, wanted = evaluated(narrow), evaluated(model)
    assert (found - wanted).norm() <= 0.1 * wanted.norm()
    assert {name: s.scale for name, s in states(narrow).items() if name in weights} == weights
    assert states(narrow)["fc1.input"].scale == states(model)["fc1.input"].scale


DROPS: dict[str, Callable[[Any], Any]] = {
    "load": lambda m: m.load_state_dict(made().state_dict() | _scales(m)),
    "reset": lambda m: [part.reset_parameters() for part in (m[0], m[2])],
}


def _scales(model: Any) -> dict[str, torch.Tensor]:
    return {key: t.clone() for key, t in model.state_dict().items() if "fp8" in key}


@pytest.mark.parametrize("how", DROPS)
def test_other_scales_drop_it(how: str) -> None:
    _, saved = saved_in_a_region()
    twin = loaded(saved)
    DROPS[how](twin)
    wanted = _scales(twin)
    evaluated(twin)
    assert all(torch.equal(t, wanted[key]) for key, t in _scales(twin).items())


def test_it_waits_for_a_region_that_keeps_amaxes() -> None:
    model, saved = saved_in_a_region()
    twin = loaded(saved)
    te.precision(twin, {"0": None})
    for recipe in (Float8CurrentScaling(), RECIPE):
        with te.autocast(recipe=recipe):
            twin(torch.ones(2, F)).sum().backward()
        waiting = {name for name, m in twin.named_modules() if m.__dict__.get("_fp8_states", States()).waiting}
        assert waiting == ({"0", "2"} if recipe is not RECIPE else {"0"})
    te.precision(twin, {"0": RECIPE})
    step(model, 3.0)
    step(twin, 3.0)
    for role in ("input", "weight"):
        assert torch.equal(states(twin)[f"0.{role}"].amax_history, states(model)[f"0.{role}"].amax_history)


def test_checkpoints_without_scales_or_without_metadata_load() -> None:
    """A plain dict loads the scales that calls had; without scales other records are ignored."""
    _, saved = saved_in_a_region()
    twin = loaded(dict(saved.items()))
    evaluated(twin)
    assert same([t for _, t in sorted(_scales(twin).items())], [t for k, t in sorted(saved.items()) if "fp8" in k])
    plain = copy.deepcopy(saved)
    for key in [key for key in plain if "fp8" in key]:
        del plain[key]
    bare = loaded(plain)
    step(bare, 2.0)
    assert all(float(s.amax_history[1]) == 0.0 for s in states(bare).values())
    model = made()
    step(model, 2.0)
    assert not any(RECORDED in said for said in model.state_dict()._metadata.values())
    assert not any(m.__dict__["_fp8_states"].waiting for m in copy.deepcopy(model) if "_fp8_states" in m.__dict__)


@pytest.mark.parametrize("around", ["fake", "grad", "vmap"])
def test_saved_where_pytorch_transforms(around: str) -> None:
    """Records are saved there, too, and no number is asked of a stand-in."""
    model = made()
    step(model, 2.0)
    found: list[Any] = []

    def save(x: torch.Tensor) -> torch.Tensor:
        found.append(model.state_dict()._metadata["0"].get(RECORDED))
        return x.sum()

    if around == "fake":
        with FakeTensorMode(allow_non_fake_inputs=True):
            save(torch.ones(2))
    else:
        (torch.func.grad(save) if around == "grad" else torch.func.vmap(save))(torch.ones(2, 2))
    assert found[0][""][0] == 2.0

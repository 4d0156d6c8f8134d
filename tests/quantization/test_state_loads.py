"""Checkpoints between calls, and what these recorded before: it comes along, or is dropped; scales that are given."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call

import te_fuser as te
from te_fuser import ops
from te_fuser.params.scales import RECORDED, States
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling
from tests.quantization.regions import Reference
from tests.refused import raises

F = 32
RECENT = DelayedScaling(amax_history_len=3, amax_compute_algo="most_recent")
WHOLE: dict[str, Callable[[], Any]] = {
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


def made_by(name: str = "list") -> Any:
    torch.manual_seed(0)
    return WHOLE[name]()


def step_of(model: Any, factor: float, look: Callable[[Any], Any] | None = None) -> tuple[torch.Tensor, Any]:
    """y, and what somebody sees inside of the region, behind the backward."""
    with te.autocast(recipe=RECENT):
        y = model(factor * torch.linspace(-1.0, 1.0, 8 * F).view(8, F))
        (factor * y).sum().backward()
        return y.detach(), None if look is None else look(model)


def evaluated(model: Any) -> torch.Tensor:
    with torch.no_grad(), te.autocast(recipe=RECENT):
        return model(torch.linspace(-1.0, 1.0, 8 * F).view(8, F))  # type: ignore[no-any-return]


def flat(model: Any) -> list[torch.Tensor]:
    return [t for both in states(model).values() for t in both]


def same(found: Any, wanted: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def loaded(saved: Any, name: str = "list", **how: Any) -> Any:
    model = made_by(name)
    states(model)  # so that a module of torch.nn's knows scales
    model.load_state_dict(saved, **how)
    return model


def saved_in_a_region(name: str = "list", times: int = 2) -> tuple[Any, Any]:
    """A model, and what it saved in the region of its last step, whose amaxes are in no history there."""
    model = made_by(name)
    for k in range(times - 1):
        step_of(model, 2.0 + k)
    saved = step_of(model, 5.0, lambda m: copy.deepcopy(m.state_dict()))[1]
    return model, saved


WAYS: dict[str, Callable[[Any, str], Any]] = {
    "saved": lambda m, name: loaded(copy.deepcopy(m.state_dict()), name),
    "copied": lambda m, name: copy.deepcopy(m),
    "pickled": lambda m, name: pickle.loads(pickle.dumps(m)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", WHOLE)
def test_what_is_taken_inside_of_a_region_goes_on_as_the_model_does(name: str, way: str) -> None:
    model = made_by(name)
    step_of(model, 2.0)
    before = {key: t.clone() for key, t in model.state_dict().items()}
    twin = step_of(model, 5.0, lambda m: WAYS[way](m, name))[1]
    found = {key: t for key, t in twin.state_dict().items() if "fp8" in key}
    assert found and all(torch.equal(t, before[key]) for key, t in found.items())  # as calls in the region have it
    for factor in (3.0, 1.0):
        assert torch.equal(step_of(twin, factor)[0], step_of(model, factor)[0])
    assert same(flat(twin), flat(model))


@pytest.mark.parametrize("name", WHOLE)
def test_evaluation_has_it_and_trains_on(name: str) -> None:
    """Evaluation folds the saved amaxes as a step of their own, which the next step does not raise."""
    model, saved = saved_in_a_region(name)
    twin = loaded(saved, name)
    for m in (model, twin):
        evaluated(m)
    assert torch.equal(evaluated(twin), evaluated(model)) and same(flat(twin), flat(model))
    for factor in (9.0, 1.0):
        step_of(model, factor)
        step_of(twin, factor)
    assert same(flat(twin), flat(model))


def test_weights_in_8_bits_alone_keep_their_scale() -> None:
    model, saved = saved_in_a_region("preset")
    with te.quantized_model_init():
        narrow = made_by("preset")
    narrow.load_state_dict(saved)
    weights = {name: s.scale for name, s in states(narrow).items() if name.endswith("weight")}
    found, wanted = evaluated(narrow), evaluated(model)
    assert (found - wanted).norm() <= 0.1 * wanted.norm()
    assert {name: s.scale for name, s in states(narrow).items() if name in weights} == weights
    assert states(narrow)["fc1.input"].scale == states(model)["fc1.input"].scale


DROPS: dict[str, Callable[[Any], Any]] = {
    "load": lambda m: m.load_state_dict(made_by().state_dict() | _scales(m)),
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
    for recipe in (Float8CurrentScaling(), RECENT):
        with te.autocast(recipe=recipe):
            twin(torch.ones(2, F)).sum().backward()
        waiting = {name for name, m in twin.named_modules() if m.__dict__.get("_fp8_states", States()).waiting}
        assert waiting == ({"0", "2"} if recipe is not RECENT else {"0"})
    te.precision(twin, {"0": RECENT})
    step_of(model, 3.0)
    step_of(twin, 3.0)
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
    step_of(bare, 2.0)
    assert all(float(s.amax_history[1]) == 0.0 for s in states(bare).values())
    model = made_by()
    step_of(model, 2.0)
    assert not any(RECORDED in said for said in model.state_dict()._metadata.values())
    assert not any(m.__dict__["_fp8_states"].waiting for m in copy.deepcopy(model) if "_fp8_states" in m.__dict__)


@pytest.mark.parametrize("around", ["fake", "grad", "vmap"])
def test_saved_where_pytorch_transforms(around: str) -> None:
    """Records are saved there, too, and no number is asked of a stand-in."""
    model = made_by()
    step_of(model, 2.0)
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


RECIPE = DelayedScaling(amax_history_len=3)
BOTH = "fp8_scale", "fp8_amax_history"
Numbers = dict[str, tuple[torch.Tensor, torch.Tensor]]


def forward(model: Any, factor: float = 1.0, recipe: DelayedScaling = RECIPE) -> torch.Tensor:
    with te.autocast(recipe=recipe):
        return model(factor * torch.linspace(-1.0, 1.0, 8 * 16).view(8, 16))  # type: ignore[no-any-return]


def step(model: Any, factor: float = 1.0, recipe: DelayedScaling = RECIPE) -> None:
    forward(model, factor, recipe).square().sum().backward()


def trained(model: Any) -> Any:
    for _ in range(2):
        step(model)
    return model


def assert_same(found: Numbers, wanted: Numbers) -> None:
    assert found.keys() == wanted.keys()
    for name, both in wanted.items():
        for one, other in zip(found[name], both, strict=True):
            assert torch.equal(one, other), name


MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)),
    "preset": lambda: te.LayerNormMLP(16, 32),
    "joined": lambda: te.Linear(16, 48, parameters_split=("q_", "k_", "v_")),
    "torch.nn": lambda: te.from_torch(torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 16))),
}


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("looked", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_amaxes_of_before_are_not_of_what_was_loaded(name: str, looked: bool, assign: bool) -> None:
    saved = trained(MODELS[name]())
    wanted, checkpoint = states(saved), copy.deepcopy(saved.state_dict())
    model = MODELS[name]()
    step(model, 100.0)
    if looked:
        states(model)
        step(model, 50.0)
    model.load_state_dict(checkpoint, assign=assign)
    assert_same(states(model), wanted)
    step(model)
    step(saved)
    assert_same(states(model), states(saved))


def test_what_comes_behind_a_load_counts() -> None:
    """A backward of a forward from before it, too: what that recorded is gone, and its gradient goes in."""
    saved = trained(te.Linear(16, 32))
    checkpoint = copy.deepcopy(saved.state_dict())
    wanted, model = states(saved), te.Linear(16, 32)
    with te.autocast(recipe=RECIPE):
        y = forward(model, 100.0)
        model.load_state_dict(checkpoint)
    y.backward(torch.full_like(y, 3.0))
    found = states(model)
    for name in ("input", "weight"):
        assert_same({name: found[name]}, {name: wanted[name]})
    scale, history = found["output_gradient"]
    assert history.tolist() == [3.0, *wanted["output_gradient"][1][:2].tolist()]
    assert torch.equal(scale, torch.tensor(57344.0) / history.max())


def test_others_keep_what_they_recorded() -> None:
    """Of a model that loads a part of its products, and where a checkpoint has no scales."""
    model, twin = (te.Sequential(ops.Linear(16, 32), ops.MatMul(32, 16)) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for m in (model, twin):
        step(m, 100.0)
    wanted = states(twin)
    plain = {key: t for key, t in model.state_dict().items() if not key.endswith(BOTH)}
    model.load_state_dict(plain, strict=False)
    assert_same(states(model), wanted)
    step(model, 200.0)
    step(twin, 200.0)
    before = {key: t.clone() for key, t in trained(MODELS["list"]()).state_dict().items() if key.startswith("0.")}
    model.load_state_dict(before, strict=False)
    found, wanted = states(model), states(twin)
    assert torch.equal(model[0].fp8_amax_history, before["0.fp8_amax_history"])
    others = [name for name in wanted if name.startswith("1.")]
    assert_same({name: found[name] for name in others}, {name: wanted[name] for name in others})


def test_looks_go_on_with_the_scales_that_were_loaded() -> None:
    """A function of one's own gets them as those of before, where it is asked again in the same region."""
    got: list[float] = []

    def made(amax: torch.Tensor, scale: torch.Tensor, most: torch.Tensor, recipe: Any) -> torch.Tensor:
        got.append(float(scale[2]))
        return most / amax

    recipe = DelayedScaling(amax_history_len=3, scaling_factor_compute_algo=made)
    model = te.Linear(16, 32)
    step(model, recipe=recipe)
    states(model)
    loaded = {**model.state_dict(), "fp8_scale": torch.tensor([1.0, 2.0, 4.0])}
    y, z = forward(model, recipe=recipe), forward(model, recipe=recipe)
    states(model)
    model.load_state_dict(loaded)
    y.sum().backward()
    states(model)
    z.sum().backward()
    got.clear()
    states(model)
    assert got == [4.0]


Tensors = dict[str, torch.Tensor]


def on() -> Any:
    return te.autocast(recipe=RECIPE)


def data(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))


def made() -> Any:
    """An op and a preset that have scales."""
    torch.manual_seed(0)
    return te.Sequential(ops.LayerNorm(16), ops.Linear(16, 16), ops.GELU(), te.Linear(16, 16))


def some_steps() -> Any:
    model = made()
    for seed in range(2):
        with on():
            y = model(data(seed))
        y.square().sum().backward()
    model.zero_grad()
    return model


def state(model: Any) -> Tensors:
    return {name: t.clone() for name, t in model.state_dict().items() if "fp8" in name}


def coarse(model: Any) -> tuple[Any, Tensors]:
    """A twin with other scales, and these."""
    twin = copy.deepcopy(model)
    for name, t in twin.named_buffers():
        if name.endswith("fp8_scale"):
            t.mul_(0.03)
    return twin, {name: t.clone() for name, t in twin.named_buffers()}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_functional_call_goes_by_what_is_given(called: bool, reference: bool, grad: bool) -> None:
    """Forward and backward, and records for the model's own; what is given stays as it is."""
    model = some_steps()
    twin, given = coarse(model)
    like, before = copy.deepcopy(model), {name: t.clone() for name, t in given.items()}
    with on(), torch.set_grad_enabled(grad):
        if called:  # a call before that is like it
            model(data(5)), like(data(5))
        if reference:
            y = functional_call(Reference(model), {f"model.{name}": t for name, t in given.items()}, (data(5),))
            wanted, own = twin.reference(data(5)), model.reference(data(5))
        else:
            y, wanted = functional_call(model, given, (data(5),)), twin(data(5))
            own = model(data(5))
        assert torch.equal(y, wanted) and not torch.equal(y, own) and torch.equal(own, like(data(5)))
    if grad:
        found, right = (
            torch.autograd.grad(t.square().sum(), [*m.parameters()]) for t, m in ((y, model), (wanted, twin))
        )
        assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))
    assert all(torch.equal(t, before[name]) for name, t in given.items())
    with on():
        pass
    assert model[1].fp8_scale[0] == like[1].fp8_scale[0] != given["1.fp8_scale"][0]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("called", [False, True])
def test_models_without_scales_are_given_none(called: bool, grad: bool) -> None:
    wanted, model = some_steps(), made()
    given = state(wanted)
    with on(), torch.set_grad_enabled(grad):
        if called:
            with torch.no_grad():
                model(data())
        words = r"fp8_scale was given to a Linear that has no such buffer yet, as torch\.fu"
        raises(ValueError, words, functional_call, model, given, (data(),))
        assert torch.equal(model(data()), made()(data()))
    model.load_state_dict({**model.state_dict(), **given})
    with on(), torch.no_grad():
        assert torch.equal(model(data()), wanted(data()))


@pytest.mark.parametrize(
    ("name", "shape"),
    [("scale", (2,)), ("scale", ()), ("amax_history", (0, 3)), ("amax_history", (3, 2)), ("amax_history", ())],
)
def test_other_shapes(name: str, shape: tuple[int, ...]) -> None:
    model = some_steps()
    with on(), pytest.raises(ValueError, match=r"scales are \[3\], and the amaxes that they are made of \[calls, 3\]"):
        functional_call(model, {f"3.fp8_{name}": torch.ones(shape)}, (data(),))


def test_other_dtypes() -> None:
    """Numbers that a conversion has rounded are restored; numbers given in 16 bits are taken as given."""
    model = some_steps()
    twin, given = coarse(model)
    rounded = {name: t.bfloat16() for name, t in given.items()}
    for name, t in twin.named_buffers():
        t.copy_(rounded[name])
    with on(), torch.no_grad():
        assert torch.equal(functional_call(model, rounded, (data(),)), twin(data()))
    before = state(model)
    model.bfloat16()
    with on(), torch.no_grad():
        model(data().bfloat16())
    after = state(model)
    assert all(torch.equal(t, after[name]) for name, t in before.items())

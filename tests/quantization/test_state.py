"""State of a product: buffers, scales, slots; copies, moves, checkpoints."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import te_fuser as te
from te_fuser import ops
from te_fuser.params.scales import HISTORY, SCALE
from te_fuser.quantization import precision, states
from te_fuser.quantization.scale_update import update
from te_fuser.quantization.state import ROLES, ReadyCheck, blocks
from te_fuser.recipe import DelayedScaling
from te_fuser.recipe.region import recomputed
from tests.quantization.folded import RECIPE, ensure, product, recorded, same, state_of, step
from tests.refused import raises
from tests.twins import stored


def trained(recipe: DelayedScaling = RECIPE, steps: int = 2, model: Any = None) -> Any:
    """A model after some steps."""
    torch.manual_seed(0)
    model = te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16)) if model is None else model
    for _ in range(steps):
        step(model, torch.randn(8, 16), recipe)
    return model


def test_state_is_plain_buffers_of_the_op_and_calls_read_others_after_a_fold() -> None:
    op = product()
    assert torch.equal(op.fp8_scale, torch.ones(3)) and torch.equal(op.fp8_amax_history, torch.zeros(3, 3))
    assert {name for name, _ in op.named_buffers()} == {"fp8_scale", "fp8_amax_history"}
    assert [float(state_of(op).numbers[f"{role}_scale"]) for role in ROLES] == [1.0] * 3
    before = state_of(op).numbers["input_scale"]
    recorded(op, 2.0)
    assert float(before) == 1.0 and before._version == 0 and float(state_of(op).numbers["input_scale"]) == 224.0
    assert torch.equal(state_of(op).numbers["input_inverse"], torch.tensor(224.0).reciprocal())


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "file", "file of weights only"])
def test_copies_have_the_state_and_go_on_by_themselves(how: str) -> None:
    model = trained()
    before = {name: (s.clone(), h.clone()) for name, (s, h) in states(model).items()}
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        twin = te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16))
        twin.load_state_dict(stored(model.state_dict(), weights_only=how == "file of weights only"), strict=True)
    assert same(twin, model)
    trained(model=twin)
    assert not same(twin, model)
    assert all(torch.equal(a, b) for n, s in states(model).items() for a, b in zip(s, before[n], strict=True))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to"])
@pytest.mark.parametrize("preset", [False, True])
def test_the_state_stays_in_float32_whatever_the_model_is_converted_to(convert: str, preset: bool) -> None:
    made = te.LayerNormMLP(16, 32, device="cpu") if preset else ops.MatMul(16, 16, device="cpu")
    model = trained(model=te.Sequential(made))
    before = {name: t.clone() for name, t in model.state_dict().items() if "fp8" in name}
    assert before
    model = model.to(torch.float16) if convert == "to" else getattr(model, convert)()
    for again in (model, copy.deepcopy(model), model.float()):
        found = {name: t for name, t in again.state_dict().items() if "fp8" in name}
        assert all(torch.equal(found[name], t) and found[name].dtype == torch.float32 for name, t in before.items())


def test_a_model_that_is_taken_to_the_meta_device_stops_no_region() -> None:
    model, other = trained(), trained()
    saved = model.state_dict()
    model.to("meta")
    trained(model=other, steps=1)
    assert all(t.is_meta for tensors in states(model).values() for t in tensors)
    assert not any(t.is_meta for tensors in states(other).values() for t in tensors)
    model.to_empty(device="cpu").load_state_dict(saved)
    x = torch.randn(8, 16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        assert model(x).isfinite().all()
    assert same(model, trained())


@pytest.mark.parametrize("make", [ops.MatMul, ops.Linear, te.Linear, te.LayerNormMLP])
@pytest.mark.parametrize("emptied", [False, True])
def test_the_state_begins_anew_with_the_parameters(make: Any, emptied: bool) -> None:
    """Amaxes of before, which no region has folded, are none of it."""
    model = te.Sequential(make(16, 16, device="cpu"))
    trained(model=model, steps=1)
    if emptied:
        assert states(model)
        model.to("meta").to_empty(device="cpu")
    model[0].reset_parameters()
    for name, (scale, history) in states(model).items():
        assert float(scale) == 1.0 and not history.any(), name
    with te.autocast(recipe=RECIPE):
        assert model(torch.randn(8, 16)).isfinite().all()


def test_checkpoints_load_strictly_with_state_and_without() -> None:
    model, plain = trained(), te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16))
    of_plain = plain.state_dict()
    before = {name: (s.clone(), h.clone()) for name, (s, h) in states(model).items()}
    assert model.load_state_dict(of_plain, strict=True) == ([], [])
    assert all(torch.equal(a, b) for n, s in states(model).items() for a, b in zip(s, before[n], strict=True))
    assert plain.load_state_dict(model.state_dict(), strict=True) == ([], [])
    assert same(plain, model) and torch.equal(plain[2].weight, model[2].weight)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        x = torch.randn(8, 16)
        assert torch.equal(plain(x), model(x))
    assert plain.load_state_dict(of_plain, strict=True, assign=True) == ([], [])


@pytest.mark.parametrize("left", ["fp8_scale", "fp8_amax_history"])
@pytest.mark.parametrize("strict", [True, False])
def test_half_of_a_state_is_refused(left: str, strict: bool) -> None:
    model, plain = trained(), te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16))
    half = {name: t for name, t in model.state_dict().items() if not name.endswith(left)}
    for m in (plain, model):
        words = f"of MatMul comes without {left}, or with one of another shape: the scales of a product"
        raises(RuntimeError, words, m.load_state_dict, half, strict=strict)
    assert not dict(plain.named_buffers())


@pytest.mark.parametrize(
    ("left", "number"),
    [(name, number) for name in (SCALE, HISTORY) for number in (float("nan"), float("inf"), -1.0)] + [(SCALE, 0.0)],
)
def test_numbers_that_calls_cannot_go_by_are_not_loaded(left: str, number: float) -> None:
    """By path; and of scales and history then neither, whether modules have some or not, so nothing goes by them."""
    model, plain = trained(), te.Sequential(ops.Linear(16, 32), ops.GELU(), ops.MatMul(32, 16))
    saved, before = {name: t.clone() for name, t in model.state_dict().items()}, copy.deepcopy(model)
    saved[f"2.{left}"].view(-1)[1] = number
    for m in (model, plain):
        words = rf"2\.{left} has {number} among its numbers, where .*leave it and 2\.fp8"
        raises(RuntimeError, words, m.load_state_dict, saved, strict=False)
    assert same(model, before)
    assert [*states(plain)] == [f"0.{role}" for role in ROLES]  # what is sound is loaded


def test_they_are_refused_of_modules_of_torch_nn_too() -> None:
    linear = torch.nn.Linear(16, 32)
    trained(model=te.Sequential(ops.Bound(ops.MatMul(16, 32, device="meta"), linear, weight="weight")))
    saved, before = {name: t.clone() for name, t in linear.state_dict().items()}, linear.fp8_scale.clone()
    saved["fp8_scale"][1] = float("nan")
    around = torch.nn.ModuleDict({"up": linear, "list": te.Sequential(ops.MatMul(16, 16))})
    for m, prefix in ((linear, ""), (around, "up.")):
        with pytest.raises(RuntimeError, match=rf"{prefix}fp8_scale has nan among its numbers") as raised:
            m.load_state_dict({prefix + name: t for name, t in saved.items()}, strict=False)
        assert str(raised.value).count("among its numbers") == 1 and torch.equal(linear.fp8_scale, before)


def test_what_each_call_asks_of_states_is_one_loop() -> None:
    """Checks call no function for each state; buffers that a user put are seen, whichever product's they are."""

    def calls(states: list[Any]) -> int:
        found, asked = list[str](), ReadyCheck(states, records=True)
        asked()  # which notes the region
        sys.setprofile(lambda frame, event, argument: found.append(event))
        try:
            assert asked()
        finally:
            sys.setprofile(None)
        return found.count("call")

    found = [state_of(product()) for _ in range(5)]
    assert calls(found) == calls(found[:1])
    for state in found:
        asked = ReadyCheck(found, records=True)
        for name, t in ((SCALE, state.scale), (HISTORY, state.history)):
            state._buffers[name] = t.clone()
            assert not asked()
            state._buffers[name] = t
            assert asked()


def test_buffers_of_ones_own_that_are_called_so_load_as_ever() -> None:
    model = te.Sequential(torch.nn.Linear(16, 16), ops.Linear(16, 16))
    model[0].register_buffer("fp8_scale", torch.zeros(3))
    saved = {name: torch.ones_like(t) for name, t in model.state_dict().items()}
    model.load_state_dict(saved)
    assert torch.equal(model[0].fp8_scale, torch.ones(3))


def test_checkpoints_have_what_was_recorded_and_count_for_the_next_call() -> None:
    one, other = trained(steps=2), trained(steps=2)
    trained(steps=3, model=other)
    assert not same(one, other)
    x = torch.randn(8, 16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        one(x)
        one.load_state_dict(other.state_dict())  # inside of the region, between two calls that are alike
        assert torch.equal(one(x), other(x))
    model = trained()
    saved = model.state_dict()
    assert float(saved["2.fp8_amax_history"][1, 2]) > 0  # of the second backward, which nothing came after
    assert torch.equal(saved["2.fp8_scale"][2], states(model)["2.output_gradient"].scale)
    with te.autocast(recipe=RECIPE):
        assert torch.equal(saved["2.fp8_scale"], model[2].fp8_scale)


@pytest.mark.parametrize(
    ("make", "prefixes"),
    [
        (lambda: te.LayerNormMLP(16, 32), ("fc1", "fc2")),
        (lambda: te.Linear(16, 48, parameters_split=("q_", "k_", "v_")), ("q_k_v",)),  # joined, which have one state
    ],
)
def test_presets_have_state_by_the_names_of_their_weights(make: Any, prefixes: tuple[str, ...], tmp_path: Path) -> None:
    """Names that safetensors takes, too."""
    model, twin = trained(model=make()), make()
    names = [n for n in model.state_dict() if "fp8" in n]
    assert names == [f"{prefix}_fp8_{kind}" for prefix in prefixes for kind in ("scale", "amax_history")]
    assert [*states(model)] == [f"{prefix}.{role}" for prefix in prefixes for role in ROLES]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert twin.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True) == ([], [])
    assert same(twin, model)
    assert twin.load_state_dict(make().state_dict(), strict=True) == ([], [])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("fp8_scale", torch.ones(2)), ("fp8_amax_history", torch.ones(4)), ("fp8_scales", torch.ones(3))],
)
def test_what_is_no_state_is_unexpected(name: str, tensor: torch.Tensor) -> None:
    op = ops.MatMul(16, 16)
    raises(RuntimeError, name, op.load_state_dict, {**op.state_dict(), name: tensor}, strict=True)
    with pytest.raises(RuntimeError, match="fp8_scale"):
        ops.LayerNorm(3).load_state_dict({**ops.LayerNorm(3).state_dict(), "fp8_scale": torch.ones(3)}, strict=True)


@pytest.mark.parametrize("length", [2, 6])
def test_another_length_keeps_the_newest(length: int) -> None:
    model = trained(steps=3)
    before = {name: h.clone() for name, (_, h) in states(model).items()}
    with te.autocast(recipe=DelayedScaling(amax_history_len=length)):
        with torch.no_grad():  # which changes nothing
            model(torch.randn(8, 16))
        assert all(torch.equal(history, before[name]) for name, (_, history) in states(model).items())
        model(torch.randn(8, 16))
    for name, (_, history) in states(model).items():
        newer = 0 if name.endswith("gradient") else 1
        kept = min(length - newer, 3)
        assert history.shape == (length,) and torch.equal(history[newer:][:kept], before[name][:kept])
        assert float(history[newer + kept :].sum()) == 0.0


def test_a_model_that_moved_keeps_its_state() -> None:
    op = product()
    state_of(op).numbers["input_amax"].fill_(2.0)
    with te.autocast(recipe=RECIPE):
        state = ensure(op, RECIPE, torch.device("meta"))  # there are no values there, but the way is the same
    assert state.block is not None and state.block.device.type == "meta" and op.fp8_scale.is_meta
    assert state_of(op).numbers["input_amax"].is_meta and all(
        s is not state for b in blocks() for s in b.states() if not b.amaxes.is_meta
    )


def test_there_are_as_many_slots_as_products() -> None:
    gc.collect()
    made = [product() for _ in range(260)]
    for n, op in enumerate(made):
        state_of(op).numbers["input_amax"].fill_(n + 1.0)
    update()
    assert [float(op.fp8_amax_history[0, 0]) for op in made] == [n + 1.0 for n in range(260)]
    count = sum(len(b.states()) for b in blocks())
    del made, op
    assert sum(len(b.states()) for b in blocks()) == count - 260


def test_two_recipes_for_one_state_in_one_region() -> None:
    op, other = ops.MatMul(16, 16), DelayedScaling(amax_history_len=8)
    x = torch.randn(4, 16)
    for _ in range(2):  # the second time both have plans
        for _ in range(2):
            with te.autocast(recipe=RECIPE):
                op(x)
                with te.autocast(recipe=other), pytest.raises(ValueError, match=r"MatMul\.weight runs by a second rec"):
                    op(x)
                op(x)
        with te.autocast(recipe=other):
            op(x)
        assert len(op.fp8_amax_history) == 8
    op, other = product(), DelayedScaling(amax_history_len=8)
    with recomputed(()):
        assert ensure(op, other).recipe == RECIPE and len(op.fp8_amax_history) == 3


def test_shared_weights_have_one_state_and_models_that_ran_in_no_region_none() -> None:
    first = ops.Linear(16, 16)
    model = te.Sequential(first, ops.GELU(), first, verify=True)
    trained(model=model)
    assert [*states(model)] == [f"0.{role}" for role in ROLES]
    model = te.Sequential(ops.Linear(16, 16))
    model(torch.randn(2, 16)).sum().backward()
    assert states(model) == {} and [*model.state_dict()] == ["0.weight", "0.bias"]


def test_precision_is_kept_by_copies() -> None:
    model = te.Sequential(ops.Linear(16, 16), ops.Linear(16, 16))
    precision(model, {"1": None})
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        trained(model=twin)
        assert [*states(twin)] == [f"0.{role}" for role in ROLES]


def test_converted_models_load_strictly_and_revert() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    model, twin = transformers.LlamaForCausalLM(config), transformers.LlamaForCausalLM(config)
    plain = [*model.state_dict()]
    for m in (model, twin):
        te.convert(m, check=False)
    tokens = torch.randint(0, 32, (2, 16))
    for _ in range(2):
        with te.autocast(recipe=RECIPE):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
    assert len(states(model)) == 12
    missing, unexpected = twin.load_state_dict(model.state_dict(), strict=True)
    assert missing == unexpected == []
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        assert torch.equal(twin(tokens).logits, model(tokens).logits)
    assert same(twin, model)
    te.revert(twin)
    update()
    assert [*twin.state_dict()] == plain
    missing, unexpected = model.load_state_dict(twin.state_dict(), strict=True)
    assert missing == unexpected == []

"""Weights kept in 8 bits from micro-batch to micro-batch, by is_first_microbatch."""

from __future__ import annotations

import copy
import functools
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import te_fuser as te
from te_fuser.quantization import checkpoint_contexts, microbatch, states, weights
from te_fuser.quantization.products import products_of
from te_fuser.quantization.state import state_of
from te_fuser.quantization.weights import KEPT, keep
from te_fuser.recipe import DelayedScaling
from tests.quantization.regions import FFN, F, assert_same, data, on, trained

HEADS = 4


def layer(**how: Any) -> te.TransformerLayer:
    return te.TransformerLayer(F, FFN, HEADS, hidden_dropout=0.0, attention_dropout=0.0, **how)


MODELS: dict[str, Callable[[], Any]] = {
    "Linear": lambda: te.Linear(F, FFN),
    "joined": lambda: te.Linear(F, 3 * FFN, parameters_split=("query", "key", "value")),
    "LayerNormLinear": lambda: te.LayerNormLinear(F, FFN),
    "LayerNormMLP": lambda: te.LayerNormMLP(F, FFN),
    "checkpointed": lambda: te.LayerNormMLP(F, FFN, checkpoint=True),
    "MultiheadAttention": lambda: te.MultiheadAttention(F, HEADS, attention_dropout=0.0),
    "TransformerLayer": layer,
    "apart": lambda: layer(fuse_qkv_params=False),
    "hooked": lambda: hooked(layer()),
    "verified": lambda: te.LayerNormMLP(F, FFN, verify=True),  # each step against float64
    "list": lambda: te.Sequential(te.LayerNorm(F), te.Linear(F, FFN), te.Linear(FFN, F)),
}


def hooked(model: Any) -> Any:
    """The layer, whose MLP runs by its own __call__."""
    model.layernorm_mlp.register_forward_hook(lambda *_: None)
    return model


def made(name: str) -> Any:
    torch.manual_seed(0)
    return trained(MODELS[name]())


def kept_of(model: Any) -> list[dict[str, torch.Tensor]]:
    return [dict(state_of(weight).kept) for weight in products_of(model).values()]


def step(model: Any, x: torch.Tensor, first: bool | None) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """y, and the gradients of x and all parameters, of one call; a list is told by a context."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    listed = type(model) is te.Sequential
    with on(), microbatch(first) if listed else nullcontext():
        y = model(x, **({} if listed else {"is_first_microbatch": first}))
    y.square().sum().backward()
    return y.detach(), {"x": x.grad.clone(), **{n: p.grad.clone() for n, p in model.named_parameters()}}  # type: ignore[union-attr]


def change(model: torch.nn.Module, by: float = 0.5) -> None:
    """By `.data`, which raises no version."""
    for name, p in model.named_parameters():
        if "weight" in name and p.dim() == 2:
            p.data.mul_(by)


@pytest.fixture(autouse=True)
def _loud() -> Any:
    """A warning is an error, but where a test asks for it."""
    weights.say_once.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients_are_those_of_weights_quantized_anew(name: str) -> None:
    """Bit for bit, with gradients of x and all parameters, whose scales move in between."""
    model = made(name)
    twin = copy.deepcopy(model)
    for number, first in enumerate((True, False, False, True)):
        assert_same(step(model, data(number), first), step(twin, data(number), None))
    assert all(set(k) == set(KEPT) for k in kept_of(model))
    assert all(set(k) == set() for k in kept_of(twin))


@pytest.mark.parametrize("name", MODELS)
def test_later_micro_batches_go_on_with_the_old_weights(name: str) -> None:
    """False is a call with the weights of the last True; None and True take the weights of now."""
    model = made(name)
    old = copy.deepcopy(model)
    assert_same(step(model, data(3), True), step(old, data(3), None))
    before = kept_of(model)
    change(model)
    for _ in range(2):  # of which the second is known to be like the first
        y, gradients = step(model, data(4), False)
        z, wanted = step(old, data(4), None)
        assert torch.equal(y, z) and torch.equal(gradients["x"], wanted["x"])
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), before, strict=True) for k in KEPT)
    now = copy.deepcopy(model)
    assert kept_of(now) == [{}] * len(before)
    assert_same(step(model, data(5), None), step(now, data(5), None))
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), before, strict=True) for k in KEPT)
    for by in (1.0, -1.0):  # also where it is like the last call in all else
        for m in (model, now):
            change(m, by)
        assert_same(step(model, data(6), True), step(now, data(6), None))
    assert not any(one[KEPT[0]] is other[KEPT[0]] for one, other in zip(kept_of(model), before, strict=True))


def _written(model: Any) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(-0.5)


def _loaded(model: Any, assign: bool = False) -> None:
    model.load_state_dict({n: -0.5 * t if "fp8" not in n else t for n, t in model.state_dict().items()}, assign=assign)


def _replaced(model: Any) -> None:
    for m in model.modules():
        for name, p in m.named_parameters(recurse=False):
            setattr(m, name, torch.nn.Parameter(-0.5 * p.detach()))


CHANGES = {"written": _written, "loaded": _loaded, "assigned": lambda m: _loaded(m, True), "replaced": _replaced}


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("name", ["joined", "LayerNormMLP", "checkpointed", "apart"])
def test_weights_that_are_others_are_quantized_again(name: str, how: str) -> None:
    """By a False, too, and kept from then on; nothing has to be said."""
    model = made(name)
    step(model, data(0), True)
    step(model, data(1), False)  # which knows how it goes
    CHANGES[how](model)
    twin = copy.deepcopy(model)
    before = kept_of(model)
    for number in (2, 3):
        assert_same(step(model, data(number), False), step(twin, data(number), None))
        now = kept_of(model)
        assert all((one[KEPT[0]] is other[KEPT[0]]) is (number == 3) for one, other in zip(now, before, strict=True))
        before = now


@pytest.mark.parametrize("how", ["te", "inner"])
def test_what_runs_again_reads_what_it_read_before_a_write(how: str) -> None:
    """Its weights in 8 bits, that is: a write in between changes none of them."""
    model, plain = (made("checkpointed" if how == "inner" else "LayerNormMLP") for _ in range(2))
    outputs = []
    for m in (model, plain):
        with on():
            m(data(0), is_first_microbatch=True)
            outputs.append(te.checkpoint(m, data(1), is_first_microbatch=False) if how == "te" else m(data(1)))
    with torch.no_grad():
        model.fc1_weight.mul_(-2.0)  # to 8 bits and back it would be another one
        model.fc1_weight.mul_(-0.5)
    kept_now = kept_of(model)
    for g, w in zip(to_input(model, outputs[0]), to_input(plain, outputs[1]), strict=True):
        assert torch.equal(g, w)
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), kept_now, strict=True) for k in KEPT)


def test_data_and_scale_stay_together() -> None:
    """Folds in between move the scale of the weight; what is kept is divided by that of then."""
    model, x = te.Linear(F, FFN, bias=False), data(0)
    with on():
        y = model(x, is_first_microbatch=True)
    y.sum().backward()
    scale = states(model)["weight"][0].item()  # this folds
    with on(), torch.no_grad():
        y = model(x, is_first_microbatch=False)
    assert scale != 1.0
    ((data8, turned, inverse),) = [k.values() for k in kept_of(model)]
    w = model.get_parameter("weight")
    assert inverse == 1.0 and torch.equal(data8.float(), w.to(torch.float8_e4m3fn).float())
    assert torch.equal(turned.float(), data8.float().mT)
    x8 = te.quantization.quantize(x, torch.float8_e4m3fn, states(model)["input"][0].item())
    torch.testing.assert_close(y.double(), x8.dequantize().double() @ data8.double().mT, rtol=1e-6, atol=1e-5)


def test_only_calls_that_quantize_a_weight_record_it() -> None:
    model = te.Linear(F, FFN)
    for first, wanted in ((True, 1), (False, 1), (False, 1), (True, 2), (None, 3)):
        step(model, data(0), first)
        assert int((states(model)["weight"][1] > 0).sum()) == wanted, first
    assert int((states(model)["input"][1] > 0).sum()) == 3  # all that it remembers


def to_input(model: Any, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The gradients of the norm's parameters, which have come through both products."""
    return torch.autograd.grad(y.square().sum(), [model.layer_norm_weight, model.layer_norm_bias])


@pytest.mark.parametrize("how", ["te", "torch", "inner", "late"])
def test_what_runs_again_reads_what_it_read(how: str) -> None:
    """Also where another first micro-batch has come in between; so does a late backward, which runs nothing again."""
    model = made("checkpointed" if how == "inner" else "LayerNormMLP")
    plain = made("LayerNormMLP")
    plain.load_state_dict(model.state_dict())

    def call(x: torch.Tensor, first: bool) -> torch.Tensor:
        if how == "te":
            return te.checkpoint(model, x, is_first_microbatch=first)
        if how == "torch":
            contexts: Any = {"use_reentrant": False, "context_fn": checkpoint_contexts}
            return checkpoint(model, x, is_first_microbatch=first, **contexts)
        return model(x, is_first_microbatch=first)

    with on():
        ys = [call(data(0), True), call(data(1), False), call(data(1), False)]
    with on():
        zs = [plain(data(0)), plain(data(1)), plain(data(1))]
    change(model, -1.0)
    with on():
        model(data(2), is_first_microbatch=True)
    newest, change_back = kept_of(model), functools.partial(change, model, -1.0)
    change_back()  # weights themselves are what they are when it runs again; what is kept is of then
    for y, z in reversed([*zip(ys, zs, strict=True)]):
        assert torch.equal(y, z)
        for g, w in zip(to_input(model, y), to_input(plain, z), strict=True):
            assert torch.equal(g, w)
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), newest, strict=True) for k in KEPT)


def test_no_gradients_and_weights_that_tell_no_writes() -> None:
    """Inference keeps weights, too, and later training reads them."""
    for mode in (torch.no_grad, torch.inference_mode):
        model = made("LayerNormMLP")
        twin = copy.deepcopy(model)
        with on(), mode():
            assert torch.equal(model(data(0), is_first_microbatch=True), twin(data(0)))
            assert torch.equal(model(data(1), is_first_microbatch=False), twin(data(1)))
        assert_same(step(model, data(2), False), step(twin, data(2), None))
    # Weights of inference mode: kept ones are in another memory, as soon as one may have been written.
    torch.manual_seed(0)
    with torch.inference_mode(), on():
        model = te.LayerNormMLP(F, FFN)
        model(data(0), is_first_microbatch=True)
        for factor in (1.0, 4.0, -2.0):
            model.fc1_weight.mul_(factor)
            assert torch.equal(model(data(1), is_first_microbatch=False), model(data(1)))


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP", "fused"])
def test_main_grad(name: str) -> None:
    """True writes over it, False adds to it, both bit for bit as weights that are quantized anew give."""
    torch.manual_seed(0)
    sizes = {"fuse_wgrad_accumulation": True}
    make = {
        "Linear": lambda: te.Linear(F, FFN, **sizes),
        "LayerNormMLP": lambda: te.LayerNormMLP(F, FFN, **sizes),
        "fused": lambda: layer(fuse_qkv_params=True, **sizes),
    }[name]
    model = make()
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)  # type: ignore[attr-defined]
    twin = copy.deepcopy(trained(model))
    for p in twin.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    for number, first in enumerate((True, False, False, True, False)):
        with on():
            y = model(data(number), is_first_microbatch=first)
        with on():
            z = twin(data(number))
        if first:
            for p in twin.parameters():
                p.main_grad.zero_()
        for t in (y, z):
            t.square().sum().backward()
        assert torch.equal(y, z)
        for (n, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(p.main_grad, q.main_grad), n  # type: ignore[attr-defined]


def test_false_before_any_true_is_said_once() -> None:
    model, other = made("LayerNormMLP"), made("Linear")
    twin = copy.deepcopy(model)
    with pytest.warns(UserWarning, match="begin each step with True"):
        found = step(model, data(0), False)
    assert_same(found, step(twin, data(0), None))
    step(other, data(0), False)  # said before
    before = kept_of(model)
    step(model, data(0), False)
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), before, strict=True) for k in KEPT)


def test_plans_keep_nothing() -> None:
    """Planning and explaining change nothing that calls read, and say which weights are kept."""
    model = made("LayerNormMLP")
    for first in (True, False):
        with on():
            said = " ".join(str(model.explain(data(0), is_first_microbatch=first, details=True)).split())
        assert "weights are quantized in the first micro-batch alone" in said
        assert not any(state_of(w).kept for w in products_of(model).values())
    with on():
        assert "micro-batch" not in " ".join(str(model.explain(data(0), details=True)).split())
        model(data(0), is_first_microbatch=True)
    before = kept_of(model)
    change(model)
    with on():
        model.explain(data(0), is_first_microbatch=True, details=True)
        model.reference(data(0), is_first_microbatch=False)
    assert all(one[k] is other[k] for one, other in zip(kept_of(model), before, strict=True) for k in KEPT)


def test_reference_reads_what_is_kept() -> None:
    model = made("LayerNormMLP")
    with on():
        model(data(0), is_first_microbatch=True)
    change(model)
    with on(), torch.no_grad():
        y, z = (f(data(1), is_first_microbatch=False) for f in (model, model.reference))
    torch.testing.assert_close(y, z, rtol=1e-3, atol=0.02)


def test_outside_of_regions_and_by_products_not_all_in_8_bits_nothing_is_kept() -> None:
    """Weights that come with each call are not kept either."""
    recipe = DelayedScaling(amax_history_len=4, override_linear_precision=(False, False, True))
    model = te.LayerNormMLP(F, FFN)
    for first in (True, False):
        assert torch.equal(model(data(0), is_first_microbatch=first), model(data(0)))
    assert kept_of(model) == [{}, {}]
    with on(recipe):
        assert torch.equal(model(data(0), is_first_microbatch=True), model(data(0)))
    linear, w = te.Linear(F, FFN), torch.randn(FFN, F)
    with on():
        y = linear(data(0), weight=w, is_first_microbatch=True)
        assert torch.equal(linear(data(0), weight=w + 1, is_first_microbatch=False), linear(data(0), weight=w + 1))
        assert not torch.equal(y, linear(data(0), weight=w + 1))
    assert kept_of(model) == [{}, {}]


def test_is_saved_nowhere_and_freed_with_the_model() -> None:
    model = made("LayerNormMLP")
    names = set(model.state_dict())
    step(model, data(0), True)
    assert set(model.state_dict()) == names
    tensors = [weakref.ref(t) for k in kept_of(model) for t in k.values()][:2]
    step(model, data(0), True)
    gc.collect()
    assert [t() for t in tensors] == [None, None]  # freed by the next one
    tensors = [weakref.ref(t) for k in kept_of(model) for t in k.values()][:2]
    del model
    gc.collect()
    assert [t() for t in tensors] == [None, None]


def test_a_model_that_is_converted_is_quantized_anew() -> None:
    """Weights of another dtype; what was kept is of the same 8 bits, and holds."""
    model = made("Linear")
    step(model, data(0), True)
    model.bfloat16()
    with on():
        y = model(data(0).bfloat16(), is_first_microbatch=False)
    assert y.dtype == torch.bfloat16 and y.isfinite().all()


@pytest.mark.parametrize("said", ["a", 1, torch.tensor(True)])
def test_micro_batches_are_true_or_false(said: Any) -> None:
    with pytest.raises(TypeError, match="microbatch takes True for the first micro-batch"), microbatch(said):
        pass


def test_captures_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = made("Linear")
    step(model, data(0), True)
    weights = [(state_of(weight), weight) for weight in products_of(model).values()]
    with on(), microbatch(True):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="weights are quantized to be kept while a CUDA graph is captured"):
            keep(weights, records=False)
        with microbatch(False):
            keep(weights, records=False)  # what is kept may be read

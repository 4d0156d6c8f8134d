"""Weights in 8 bits alone, by quantized_model_init: what models are, what they give, how they are saved and loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.quantization import microbatch, states
from te_fuser.quantization.products import products_of
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, MXFP8BlockScaling
from tests.float8 import E4M3, codes
from tests.refused import raises
from tests.twins import stored

F, FFN, HEADS = 64, 128, 4
RECIPE = DelayedScaling(amax_history_len=4)
OFF = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
MODELS: dict[str, Callable[[], Any]] = {
    "list": lambda: te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.MatMul(FFN, F)),
    "Linear": lambda: te.Linear(F, FFN),
    "joined": lambda: te.Linear(F, 3 * FFN, parameters_split=("query", "key", "value")),
    "LayerNormLinear": lambda: te.LayerNormLinear(F, FFN),
    "LayerNormMLP": lambda: te.LayerNormMLP(F, FFN, normalization="RMSNorm", activation="swiglu"),
    "MultiheadAttention": lambda: te.MultiheadAttention(F, HEADS, attention_dropout=0.0),
    "TransformerLayer": lambda: te.TransformerLayer(F, FFN, HEADS, fuse_qkv_params=True, **OFF),
}


def made(name: str) -> tuple[Any, Any]:
    """A model whose weights are in 8 bits alone, and a wide one that it was loaded from."""
    torch.manual_seed(0)
    wide = MODELS[name]()
    with te.quantized_model_init():
        narrow = MODELS[name]()
    assert narrow.load_state_dict(wide.state_dict(), strict=False).unexpected_keys == []
    return narrow, wide


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def run(model: Any, x: torch.Tensor, **how: Any) -> torch.Tensor:
    with torch.no_grad(), te.autocast(recipe=RECIPE, **how):
        return model(x)  # type: ignore[no-any-return]


def dequantized(narrow: Any, wide: Any) -> Any:
    """The wide model with the numbers that the other one's 8 bits stand for."""
    twin = copy.deepcopy(wide)
    twin.load_state_dict(narrow.state_dict())
    return twin


@pytest.mark.parametrize("name", MODELS)
def test_values_of_weights_that_take_a_byte_for_each_number(name: str) -> None:
    """Results are near the wide model's with dequantized weights, which its own quantization hardly changes."""
    narrow, wide = made(name)
    x = data(6, 2, F)
    y, twin = run(narrow, x), dequantized(narrow, wide)
    for found, exact in ((narrow.reference, None), (twin, 0.02), (wide, 0.1)):
        z = run(found, x)
        apart = (y - z).norm() / z.norm()
        assert apart <= (1e-3 if exact is None else exact), (apart, exact)
    assert torch.equal(run(narrow, x), y)  # nothing moved
    with microbatch(True):
        assert torch.equal(run(narrow, x), y)
    sizes = {n: (p.dtype, p.element_size()) for n, p in narrow.named_parameters()}
    for n, p in wide.named_parameters():
        assert narrow.get_parameter(n).shape == p.shape
        assert sizes[n] == ((E4M3, 1) if p.dim() == 2 else (torch.float32, 4)), n
        assert narrow.get_parameter(n).requires_grad == (p.dim() != 2)
    scales = {n for n, _ in narrow.named_buffers() if n.endswith("fp8_scale")}
    assert len(scales) == len(products_of(narrow)) and scales <= {*narrow.state_dict()}


def test_each_weight_has_the_scale_of_its_largest_number() -> None:
    """Parts that are joined have one; the bytes are those of `quantize`."""
    narrow, wide = made("joined")
    parts = [wide.get_parameter(f"{n}_weight") for n in ("query", "key", "value")]
    (scale,) = [s for n, (s, _) in states(narrow).items() if n.endswith("weight")]
    amax = torch.stack([p.detach().abs().max() for p in parts]).max()
    assert scale == 448.0 / amax
    for n, p in zip(("query", "key", "value"), parts, strict=True):
        wanted = te.quantization.quantize(p.detach(), E4M3, scale).data
        assert torch.equal(codes(narrow.get_parameter(f"{n}_weight").data), codes(wanted))
    with te.quantized_model_init():
        zeros = te.Linear(F, FFN, init_method=torch.nn.init.zeros_)
    assert float(states(zeros)["weight"][0]) == 1.0 and not run(zeros, data(3, F)).any()


@pytest.mark.parametrize("name", MODELS)
def test_saved_and_loaded(name: str) -> None:
    """Strictly, without code, into a model in 8 bits and a wide one; copies and saved models are the same."""
    narrow, wide = made(name)
    x = data(5, 1, F)
    y, saved = run(narrow, x), stored(narrow.state_dict(), weights_only=True)
    with te.quantized_model_init():
        other = MODELS[name]()
    other.load_state_dict(saved, strict=True)
    for twin in (other, copy.deepcopy(narrow), stored(narrow)):  # plain pickle knows no storages of 8 bits
        assert torch.equal(run(twin, x), y)
    again = copy.deepcopy(wide)
    again.load_state_dict(saved, strict=True)
    narrow.load_state_dict(again.state_dict())
    z = run(narrow, x)
    assert (z - y).norm() <= 0.02 * y.norm()


def test_a_checkpoint_of_training_brings_its_scales() -> None:
    """Scales of inputs are loaded; weights get their own."""
    _, wide = made("LayerNormMLP")
    for k in range(3):
        with te.autocast(recipe=RECIPE):
            y = wide(3.0 * data(8, F, seed=k))
        y.sum().backward()
    saved = wide.state_dict()
    with te.quantized_model_init():
        narrow = MODELS["LayerNormMLP"]()
    narrow.load_state_dict(saved, strict=True)
    for n, (scale, _) in states(wide).items():
        same = states(narrow)[n][0] == scale
        assert same or n.endswith("weight"), n
    x = data(8, F, seed=9)
    y, z = run(narrow, x), run(wide, x)
    assert (y - z).norm() <= 0.05 * z.norm()


@pytest.mark.parametrize("convert", ["bfloat16", "half", "to"])
def test_converted(convert: str) -> None:
    """Parameters in wide dtypes follow, weights stay in 8 bits."""
    narrow, _ = made("TransformerLayer")
    x = data(6, 2, F)
    y = run(narrow, x)
    with torch.autocast("cpu", torch.bfloat16):
        z = run(made("LayerNormMLP")[0], x)
    assert z.dtype == torch.bfloat16 and (z.float() - run(made("LayerNormMLP")[0], x)).norm() <= 0.05 * z.norm()
    before = {n: codes(p.data) for n, p in narrow.named_parameters() if p.dtype == E4M3}
    narrow = narrow.to(torch.bfloat16) if convert == "to" else getattr(narrow, convert)()
    dtype = torch.float16 if convert == "half" else torch.bfloat16
    z = run(narrow, x.to(dtype))
    assert z.dtype == dtype and (z.float() - y).norm() <= 0.05 * y.norm()
    assert before and all(torch.equal(codes(narrow.get_parameter(n).data), c) for n, c in before.items())
    assert {p.dtype for p in narrow.parameters()} == {E4M3, dtype}


def test_on_the_meta_device() -> None:
    """Made without memory, then loaded."""
    _, wide = made("LayerNormMLP")
    with te.quantized_model_init(), torch.device("meta"):
        narrow = MODELS["LayerNormMLP"]()
    assert {p.dtype for p in narrow.parameters()} == {E4M3, torch.float32}
    narrow = narrow.to_empty(device="cpu")
    narrow.load_state_dict(wide.state_dict(), strict=False)
    x = data(6, F)
    y, z = run(narrow, x), run(wide, x)
    assert (y - z).norm() <= 0.1 * z.norm()


def test_plans() -> None:
    """On a GPU by the library's products, and no weight is quantized."""
    with te.quantized_model_init():
        model = te.LayerNormMLP(F, FFN, params_dtype=torch.bfloat16, device="meta")
    x = torch.empty(8, F, dtype=torch.bfloat16, device="meta")
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        plan = model.plan(x, device="h200")
    names = [s.name for s in plan.forward]
    assert plan.before == () and [n for n in names if n.startswith("float8")] == ["float8_matmul_bias"] * 2
    narrow, _ = made("LayerNormMLP")
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        assert "weights in 8 bits alone" in " ".join(str(narrow.explain(data(3, F), details=True)).split())


def test_what_stays_as_it_is() -> None:
    """Sizes that are no multiple of 16, other modules, and what is made outside or in another thread's stead."""
    with te.quantized_model_init():
        odd = te.Linear(F, 24)
        plain = torch.nn.Linear(F, F)
        bound = ops.Bound(ops.MatMul(F, F, device="meta"), plain, weight="weight")
        with te.quantized_model_init(enabled=False):
            off = te.Linear(F, F)
        given = te.Linear(F, F, skip_weight_param_allocation=True)
    for module in (odd, plain, bound, off, given, te.Linear(F, F)):
        assert all(p.dtype == torch.float32 for p in module.parameters())
    assert te.fp8_model_init is te.quantized_model_init


@pytest.mark.parametrize("name", ["Linear", "LayerNormMLP"])
@torch.no_grad()
def test_verified(name: str) -> None:
    narrow, _ = made(name)
    before = codes(next(p for p in narrow.parameters() if p.dtype == E4M3).data).clone()
    with te.autocast(recipe=RECIPE):
        report = te.verify(narrow, data(6, F))
    assert report.passed, report
    assert torch.equal(codes(next(p for p in narrow.parameters() if p.dtype == E4M3).data), before)


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "outside": (lambda m: m(data(3, F)), "in 8 bits alone, and it runs outside of regions of FP8: call it in"),
    "off": (lambda m: run(m, data(3, F), enabled=False), "runs outside of regions of FP8"),
    "gradients": (
        lambda m: te.autocast(recipe=RECIPE)(m)(data(3, F)),
        "is for inference: call it under torch.no_grad()",
    ),
    "calibrating": (lambda m: run(m, data(3, F), enabled=False, calibrating=True), "leave out calibrating"),
    "float64": (lambda m: run(m, data(3, F).double()), "x is in float64, .*FP8.*convert"),
    "fill": (lambda m: m.reset_parameters(), "cannot fill them anew: load a checkpoint"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_words(name: str) -> None:
    narrow, _ = made("Linear")
    does, words = REFUSED[name]
    before = {k: t.clone() for k, t in narrow.state_dict().items() if "history" not in k}
    raises((RuntimeError, TypeError), words, does, narrow)
    assert all(torch.equal(narrow.state_dict()[k].float(), t.float()) for k, t in before.items())


@pytest.mark.parametrize("kind", [ops.MatMul, ops.Linear, te.Linear])
@pytest.mark.parametrize("ran", [False, True])
def test_one_weight_of_two_modules_is_refused(kind: Any, ran: bool) -> None:
    with te.quantized_model_init():
        model = te.Sequential(kind(32, 32), kind(32, 32))
    if ran:
        run(model, data(16, 32))
    model[1].weight = model[0].weight
    raises(RuntimeError, "is another product's, too, which has a scale of its own", run, model, data(16, 32))


@pytest.mark.parametrize("kind", [ops.Linear, te.Linear])
@pytest.mark.parametrize("moved", [False, True])
def test_one_weight_of_two_lists_is_refused(kind: Any, moved: bool) -> None:
    """Of the two that which has another weight's scale, also where it ran before, or was moved or copied since."""
    with te.quantized_model_init():
        lists = torch.nn.ModuleList([te.Sequential(kind(32, 32)), te.Sequential(kind(32, 32))])
    x = data(16, 32)
    y = run(lists[0], x)
    run(lists[1], x)
    lists[1][0].weight = lists[0][0].weight
    if moved:
        lists = lists.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match="is another product's, too, which has a scale of its own"):
        run(lists[1], x.to(lists[0][0].bias.dtype))
    assert (
        torch.equal(run(lists[0], x.to(lists[0][0].bias.dtype)).float(), y.to(lists[0][0].bias.dtype).float()) or moved
    )


@pytest.mark.parametrize("ran", [False, True])
def test_what_was_written_in_place_is_refused(ran: bool) -> None:
    """A scale knows nothing of it; what loads, moves and copies a model brings both."""
    narrow, wide = made("LayerNormMLP")
    x = data(3, F)
    for twin in (narrow, copy.deepcopy(narrow), copy.deepcopy(narrow).to("cpu", torch.bfloat16).float()):
        y = run(twin, x) if ran else None
        with torch.no_grad():
            twin.fc2_weight.copy_(10 * wide.fc2_weight)
        raises(RuntimeError, "was written in place, which its scale knows nothing of.*load_state_dict", run, twin, x)
        twin.load_state_dict(wide.state_dict(), strict=False)
        assert y is None or torch.allclose(run(twin, x), y, rtol=0.02, atol=0.02)


IN_INFERENCE_MODE: dict[str, Callable[[Any], Any]] = {
    "made": lambda wide: made("LayerNormMLP")[0],
    "loaded": lambda wide: _loaded(made("LayerNormMLP")[0], wide.state_dict()),
    "assigned": lambda wide: _loaded(made("LayerNormMLP")[0], made("LayerNormMLP")[0].state_dict(), assign=True),
    "moved": lambda wide: made("LayerNormMLP")[0].bfloat16().float(),
    "copied": lambda wide: copy.deepcopy(made("LayerNormMLP")[0]),
    "read": lambda wide: stored(made("LayerNormMLP")[0]),
}


def _loaded(model: Any, saved: Any, **how: Any) -> Any:
    model.load_state_dict(saved, strict=False, **how)
    return model


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("way", IN_INFERENCE_MODE)
def test_what_was_written_in_place_in_inference_mode_is_refused(way: str, ran: bool) -> None:
    """Tensors made in inference mode tell no writes, so weights in 8 bits are others, wherever they come from."""
    wide, x = made("LayerNormMLP")[1], data(3, F)
    with torch.inference_mode():
        narrow = IN_INFERENCE_MODE[way](wide)
        if ran:
            torch.testing.assert_close(run(narrow, x), run(wide, x), rtol=0.1, atol=0.1)
        narrow.fc2_weight.copy_(10 * wide.fc2_weight)
        raises(RuntimeError, "was written in place, which its scale knows nothing of", run, narrow, x)
        narrow.fc2_weight = torch.nn.Parameter(narrow.fc2_weight.clone(), requires_grad=False)
        raises(RuntimeError, "made in torch.inference_mode.*, of which writes are not told: make it", run, narrow, x)
        narrow.load_state_dict(wide.state_dict(), strict=False)
        torch.testing.assert_close(run(narrow, x), run(wide, x), rtol=0.1, atol=0.1)


def test_checkpoints_that_do_not_fit_and_other_precisions_are_refused() -> None:
    narrow, wide = made("joined")
    saved = narrow.state_dict()
    alone = {k: t for k, t in saved.items() if "fp8" not in k}
    for model in (narrow, wide):
        with pytest.raises(ValueError, match="in 8 bits in the checkpoint, which has no query_key_value_fp8_scale"):
            model.load_state_dict(alone, strict=False)
    raises(ValueError, "have one scale", narrow.load_state_dict, {"query_weight": wide.query_weight}, strict=False)
    with pytest.raises(ValueError, match="have one scale"):
        narrow.load_state_dict({**saved, "query_weight": wide.query_weight}, strict=False)
    narrow, _ = made("LayerNormMLP")
    own = DelayedScaling(override_linear_precision=(True, False, False))
    with torch.no_grad(), te.autocast(recipe=own), pytest.raises(RuntimeError, match="override_linear_precision"):
        narrow(data(3, F))
    te.precision(narrow, {"fc1": None})
    raises(RuntimeError, "no product of 8 bits here: te.precision says so", run, narrow, data(3, F))


KEPT = DelayedScaling(override_linear_precision=(True, False, False))
ARGUMENTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"recipe": "hybrid"}, TypeError, "takes a recipe of te_fuser.recipe"),
    *(
        ({"recipe": kind()}, ValueError, f"take a recipe that keeps scales, DelayedScaling.. say, got {kind.__name__}")
        for kind in (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling)
    ),
    ({"recipe": KEPT}, ValueError, "without override_linear_precision"),
    ({"preserve_high_precision_init_val": True}, NotImplementedError, "is for training"),
]


@pytest.mark.parametrize(("given", "kind", "words"), ARGUMENTS)
def test_arguments_are_refused_where_it_is_on_alone(given: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), te.quantized_model_init(**given):
        pass
    if kind is not TypeError:
        with te.quantized_model_init(enabled=False, **given):
            layer = te.Linear(F, F)
        assert {p.dtype for p in layer.parameters()} == {torch.float32} and not [*layer.buffers()]
    with pytest.raises(TypeError, match="enabled is True or False, got 1"), te.quantized_model_init(1, **given):  # type: ignore[arg-type]
        pass
    with te.quantized_model_init(recipe=RECIPE):
        assert te.Linear(F, F).weight.dtype == E4M3

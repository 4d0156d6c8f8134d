"""Converted layers: values, gradients and tokens of every family's model, and calls of layers with all their names."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import (
    CACHE,
    FAMILY,
    assert_alike,
    both,
    layer_of,
    model_of,
    padded,
    results,
    tokens,
    transformers,
    ways,
)
from tests.refused import raises

IDS = tokens()


@FAMILY
def test_values_and_gradients(family: str) -> None:
    model, original = both(family)
    for training in (True, False):
        model.train(training), original.train(training)
        for call in ({}, {"use_cache": False}) if training else ({},):
            with ways(model) as found:
                assert_alike(results(model, IDS, **call), results(original, IDS, **call))
            assert set(found) <= {"causal", "given", "added"}
    assert_alike(*({"logits": each(IDS[:1, :1], use_cache=False).logits} for each in (model, original)))
    assert model(IDS[:0]).logits.shape[:2] == (0, 9)


@FAMILY
def test_padding(family: str) -> None:
    # Of what eager attention adds in float64, float32 makes infinities.
    exact = family != "gemma2"
    model, original = both(family, torch.float64 if exact else torch.float32)
    call = {"attention_mask": padded()}
    assert_alike(results(model, IDS, **call), results(original, IDS, **call), 2e-6 if exact else 1e-4)


@FAMILY
def test_narrow_dtypes(family: str) -> None:
    """As near to float64 as the original is."""
    dtype = torch.float16 if family == "llama" else torch.bfloat16
    model, original = both(family, dtype)
    exact = results(copy.deepcopy(original).double(), IDS)
    ours, theirs = results(model, IDS), results(original, IDS)
    shares = {}
    for name, want in exact.items():
        assert ours[name].dtype == theirs[name].dtype
        errors = [(made[name].double() - want).norm().item() for made in (ours, theirs)]
        shares[name] = errors[0] / (errors[1] + torch.finfo(dtype).eps * want.norm().item())
    assert max(shares.values()) < 3 and sum(shares.values()) / len(shares) < 1.1  # one tensor's error may be luck


@FAMILY
def test_it_is_trained_as_it_was(family: str) -> None:
    pair = both(family)
    for model in pair:
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            optimizer.zero_grad()
            ids = tokens(seed=step)
            model(ids, labels=ids).loss.backward()
            optimizer.step()
    assert_alike(pair[0].state_dict(), pair[1].state_dict(), 1e-5)


@FAMILY
@pytest.mark.parametrize("cache", [None, "static"])
def test_generation(family: str, cache: str | None) -> None:
    model, original = both(family, torch.float32)
    call: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": cache}
    for mask in (torch.ones_like(IDS), padded()) if cache is None else (padded(),):
        want = original.generate(IDS, attention_mask=mask, **call)
        assert torch.equal(model.generate(IDS, attention_mask=mask, **call), want)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_several_positions_behind_a_cache(family: str) -> None:
    model, original = both(family)
    found = []
    for each in (model, original):
        cache = transformers.DynamicCache(config=each.config)
        with ways(model) as how:
            pieces = [each(piece, **{CACHE: cache}, use_cache=True).logits for piece in IDS.split([4, 3, 2], 1)]
        found.append({"logits": torch.cat(pieces, 1), **{f"key {k}": c.keys for k, c in enumerate(cache.layers)}})
    assert_alike(*found)
    cache = transformers.DynamicCache(config=model.config)
    model(IDS, **{CACHE: cache})
    with ways(model) as behind:
        model(IDS[:, :2], **{CACHE: cache})
    assert not how and set(behind) == {"function"}


def test_other_caches() -> None:
    model, original = both("mistral", torch.float32)
    for make in (lambda c: transformers.DynamicCache(), lambda c: transformers.StaticCache(c, max_cache_len=20)):
        call: dict[str, Any] = {"max_new_tokens": 4, "do_sample": False, "attention_mask": padded()}
        want = original.generate(IDS, **{CACHE: make(original.config)}, **call)
        assert torch.equal(model.generate(IDS, **{CACHE: make(model.config)}, **call), want)
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    assert torch.equal(model.generate(IDS, **beams), original.generate(IDS, **beams))
    found = []
    for model in both("gpt2"):
        own = transformers.DynamicCache()
        held = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
        pieces = [layer_of(model)(piece, **{CACHE: held}) for piece in X.split([5, 4], 1)]
        found.append({"y": torch.cat(pieces, 1), "keys": own.layers[0].keys})
    assert_alike(*found)


def test_eager_attention_and_masks_of_the_caller() -> None:
    model, original = both("llama")
    for each in (model, original):
        each.set_attn_implementation("eager")
    with ways(model) as found:
        assert_alike(results(model, IDS), results(original, IDS))
        assert set(found) == {"added"}
    seen = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril()  # eager attention adds booleans too
    for mask in (torch.randn(2, 1, 9, 9, dtype=torch.float64), seen):
        wanted = original(IDS, attention_mask=mask).logits
        torch.testing.assert_close(model(IDS, attention_mask=mask).logits, wanted, rtol=0, atol=1e-5)
    model.config.is_causal = original.config.is_causal = False
    assert_alike(results(model, IDS), results(original, IDS))


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_attention_by_another_function(family: str) -> None:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask

    calls = []

    def another(*args: Any, **options: Any) -> Any:
        calls.append(options)
        return sdpa_attention_forward(*args, **options)

    transformers.AttentionInterface.register("another", another)
    ALL_MASK_ATTENTION_FUNCTIONS.register("another", sdpa_mask)
    original = model_of(family, **({"attn_logit_softcapping": None} if family == "gemma2" else {}))
    model = copy.deepcopy(original)
    model.set_attn_implementation("another")
    made = te_fuser.convert(model)
    calls.clear()
    assert_alike(results(model, IDS), results(original, IDS))
    assert len(calls) == 2
    assert made.left == {
        f"model.layers.{k}.self_attn": "attention is computed by its function, 'another'" for k in range(2)
    }


X = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(9)[None]


def angles_of(model: Any, part: slice) -> dict[str, Any]:
    """Arguments that layers with rotary positions are handed, of some positions."""
    if hasattr(model, "transformer"):
        return {}
    return {"position_embeddings": tuple(t[:, part] for t in model.model.rotary_emb(X, POSITIONS))}


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gemma2"])
def test_a_layer_takes_its_cache_by_each_of_its_names(family: str) -> None:
    found = []
    for model in both(family):
        cache, pieces = transformers.DynamicCache(), []
        for part, name in ((slice(0, 5), CACHE), (slice(5, 9), "past_key_values")):
            pieces.append(layer_of(model)(X[:, part], **{name: cache}, **angles_of(model, part)))
        kept = cache.layers[0]
        found.append({"y": torch.cat(pieces, 1), "keys": kept.keys, "values": kept.values})
    assert found[0]["keys"].shape[2] == 9
    assert_alike(*found)


class OwnCache:
    """A cache of no class of transformers, which notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def update(self, key: torch.Tensor, value: torch.Tensor, layer: int, **others: Any) -> Any:
        self.told.append((layer, sorted(others)))
        return key, value


def run_with(model: Any, cache: Any, **call: Any) -> dict[str, torch.Tensor]:
    """The first layer's output, and the gradients of its input and of a bias that is added to its scores."""
    x = X.clone().requires_grad_()
    bias = torch.randn(2, 4, 9, 9, dtype=X.dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()
    call |= {"position_bias": bias, CACHE: cache}
    y = layer_of(model)(x, **call, **angles_of(model, slice(None)))
    dx, dbias = torch.autograd.grad(y.square().sum(), (x, bias))
    return {"y": y.detach(), "dx": dx, "dbias": dbias}


@pytest.mark.parametrize("own_cache", [False, True])
def test_arguments_that_lists_do_not_know_run_as_transformers_has_them(own_cache: bool) -> None:
    original = model_of("llama")
    model = model_of("llama")
    conversion = te_fuser.convert(model)
    assert conversion.left == {}
    caches = [OwnCache() if own_cache else None for _ in range(2)]
    with pytest.warns(UserWarning, match="LlamaDecoderLayer is called with position_bias.*runs as transformers has it"):
        found = run_with(model, caches[0])
    assert_alike(found, run_with(original, caches[1]))
    named = f"position_bias, {CACHE}=<OwnCache>" if own_cache else "position_bias"
    assert conversion.left == {"model.layers.0": f"it was called with {named}, which lists of ops know nothing of"}
    if own_cache:
        assert caches[0].told == caches[1].told != []  # type: ignore[union-attr]
    model(tokens())
    assert conversion.left == {}  # of the last call
    te_fuser.revert(model)
    assert not any(name.startswith("_te_fuser") for name in vars(layer_of(model)))


def test_models_hand_their_layers_nothing_that_lists_do_not_know() -> None:
    model = model_of("qwen3")
    te_fuser.convert(model)
    ids = tokens()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(ids, labels=ids, output_hidden_states=True, num_items_in_batch=torch.tensor(4))
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=2, do_sample=False)


def test_wrong_calls_raise_as_the_class_does() -> None:
    model, original = both("gpt2")
    for each in (model, original):
        raises(TypeError, "positional argument", layer_of(each), X, *[None] * 9)
        raises(TypeError, "multiple values for argument 'hidden_states'", layer_of(each), X, hidden_states=X)
        raises(TypeError, "missing 1 required positional argument: 'hidden_states'", layer_of(each))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_without_angles_raises_as_the_class_does(family: str) -> None:
    for each in both(family):
        raises(TypeError, "NoneType", layer_of(each), X)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_check_decodes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that drops its cache is right in one call, and found out all the same."""
    from te_fuser.convert.block import DecoderBlock, LayerCall

    real, dropped = DecoderBlock.run, {CACHE: None, "attention_mask": None}
    monkeypatch.setattr(
        DecoderBlock, "run", lambda self, x, call: real(self, x, LayerCall({**call.arguments, **dropped}, CACHE))
    )
    model = model_of(family)
    raises(RuntimeError, "convert: the output by a DynamicCache of .* the model is as it was", te_fuser.convert, model)
    assert te_fuser.convert(model, check=False).error is None

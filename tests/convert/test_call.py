"""Calls of converted layers: what they are handed counts, by each of its names, or runs as transformers has it."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import CACHE, assert_alike, both, model_of, tokens, transformers

X = torch.randn(2, 9, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
POSITIONS = torch.arange(9)[None]


def layer_of(model: Any) -> Any:
    """The first layer."""
    return (model.transformer.h if hasattr(model, "transformer") else model.model.layers)[0]


def angles_of(model: Any, part: slice) -> dict[str, Any]:
    """What layers with rotary positions are handed of some positions."""
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


def test_a_cache_of_an_encoder_and_a_decoder() -> None:
    found = []
    for model in both("gpt2"):
        own = transformers.DynamicCache()
        held = transformers.EncoderDecoderCache(own, transformers.DynamicCache())
        pieces = [layer_of(model)(piece, **{CACHE: held}) for piece in X.split([5, 4], 1)]
        found.append({"y": torch.cat(pieces, 1), "keys": own.layers[0].keys})
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
        with pytest.raises(TypeError, match="positional argument"):
            layer_of(each)(X, *[None] * 9)
        with pytest.raises(TypeError, match="multiple values for argument 'hidden_states'"):
            layer_of(each)(X, hidden_states=X)
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'hidden_states'"):
            layer_of(each)()


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_layer_without_angles_raises_as_the_class_does(family: str) -> None:
    for each in both(family):
        with pytest.raises(TypeError, match="NoneType"):
            layer_of(each)(X)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_the_check_decodes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that drops its cache is right in one call, and found out all the same."""
    from te_fuser.convert.block import DecoderBlock, LayerCall

    real, dropped = DecoderBlock.run, {CACHE: None, "attention_mask": None}
    monkeypatch.setattr(
        DecoderBlock, "run", lambda self, x, call: real(self, x, LayerCall({**call.arguments, **dropped}, CACHE))
    )
    model = model_of(family)
    with pytest.raises(RuntimeError, match="convert: the output by a DynamicCache of .* the model is as it was"):
        te_fuser.convert(model)
    assert te_fuser.convert(model, check=False).error is None

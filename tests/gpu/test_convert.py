"""Converted models on a GPU: values, gradients and tokens in half precision, by kernels, beside the original."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from tests.convert.models import FAMILIES, model_of, padded, results, tokens, transformers

# As large as kernels want heads and features to be.
LARGER: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 64}


def model_on_gpu(family: str) -> Any:
    larger = {"hidden_size": 256} if family == "gpt2" else LARGER
    return model_of(family, torch.float64, **larger).cuda()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_values_and_gradients(family: str, dtype: torch.dtype) -> None:
    """As near to a wider dtype as the original is."""
    # Of what eager attention adds in float64, float32 makes infinities.
    exact = model_on_gpu(family).to(torch.float32 if family == "gemma2" else torch.float64)
    original = copy.deepcopy(exact).to(dtype)
    model = copy.deepcopy(original)
    assert te_fuser.convert(model).left == {}
    ids, mask = tokens(2, 40).cuda(), padded(2, 40).cuda()
    for call in ({}, {"use_cache": False}, {"attention_mask": mask}):
        wanted, theirs, ours = (results(each, ids, **call) for each in (exact, original, model))
        shares = {}
        for name, want in wanted.items():
            errors = [(made[name].double() - want).norm().item() for made in (ours, theirs)]
            shares[name] = errors[0] / (errors[1] + torch.finfo(dtype).eps * want.norm().item())
        assert max(shares.values()) < 3 and sum(shares.values()) / len(shares) < 1.15, call.keys()


def awaited(move: Callable[[Any], None]) -> Callable[[Any], None]:
    """A copy that nothing runs beside."""

    def moved(layer: Any) -> None:
        torch.cuda.synchronize()
        move(layer)
        torch.cuda.synchronize()

    return moved


@pytest.fixture
def moves_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of an offloaded cache are read when they are there: transformers does not wait for its copies."""
    layer = transformers.cache_utils.CacheLayerMixin
    for name in ("offload", "prefetch"):
        monkeypatch.setattr(layer, name, awaited(getattr(layer, name)))


@pytest.mark.usefixtures("moves_are_awaited")
@pytest.mark.parametrize(
    ("family", "cache", "compiled"),
    [*((family, cache, False) for family in FAMILIES for cache in (None, "static", "offloaded"))]
    + [("llama", "static", True)],
)
def test_generation(family: str, cache: str | None, compiled: bool) -> None:
    """Also by a decoding step that transformers compiles."""
    original = model_on_gpu(family).float()
    model = copy.deepcopy(original)
    te_fuser.convert(model)
    samples, call = 2 - compiled, {"max_new_tokens": 8, "do_sample": False, "cache_implementation": cache}
    if not compiled:
        call |= {"attention_mask": padded(samples, 12).cuda(), "disable_compile": True}
    ids = tokens(samples, 12).cuda()
    assert torch.equal(model.generate(ids, **call), original.generate(ids, **call))

"""GPU memory of a dropped model is free at once, with the garbage collector off."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops

FEATURES = 1024
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "list": lambda: Sequential(ops.LayerNorm(FEATURES), ops.Linear(FEATURES, FEATURES), ops.GELU()),
    "attention": lambda: Sequential(ops.Linear(FEATURES, 3 * FEATURES), ops.DotProductAttention(16, 64)),
    "Linear alone": lambda: ops.Linear(FEATURES, FEATURES),
    "row op alone": lambda: ops.LayerNorm(FEATURES),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(make: Callable[[], torch.nn.Module], graphed: bool) -> None:
    """Two steps with a model, which is dropped."""
    model = make().to("cuda", torch.bfloat16)
    x = torch.randn(512, 2, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    call = te_fuser.cuda_graph(model, x) if graphed else model
    for _ in range(2):
        call(x).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_free_when_a_model_is_dropped(name: str, no_collector: None) -> None:
    train(MODELS[name], graphed=False)  # what libraries keep for good
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        train(MODELS[name], graphed=False)
    assert torch.cuda.memory_allocated() == before


def test_a_graphed_model_is_freed_too(no_collector: None) -> None:
    """PyTorch's own graphed callables are in circles, so that this takes the collector."""
    train(MODELS["list"], graphed=True)
    gc.collect()
    before = torch.cuda.memory_allocated()
    train(MODELS["list"], graphed=True)
    gc.collect()
    assert torch.cuda.memory_allocated() == before

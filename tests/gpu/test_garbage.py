"""GPU memory of a dropped model is free at once, with the garbage collector off."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator

import pytest
import torch

from te_fuser import Sequential, ops

FEATURES = 1024
MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "list": lambda: Sequential(ops.LayerNorm(FEATURES), ops.Linear(FEATURES, FEATURES), ops.GELU()),
    "attention": lambda: Sequential(
        ops.Linear(FEATURES, 3 * FEATURES), ops.DotProductAttention(16, 64, mask="none", layout="sequence_first")
    ),
    "Linear alone": lambda: ops.Linear(FEATURES, FEATURES),
    "row op alone": lambda: ops.LayerNorm(FEATURES),
}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def train(make: Callable[[], torch.nn.Module]) -> None:
    """Two steps with a model, which is dropped."""
    model = make().to("cuda", torch.bfloat16)
    x = torch.randn(512, 2, FEATURES, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_free_when_a_model_is_dropped(name: str, no_collector: None) -> None:
    train(MODELS[name])  # what libraries keep for good
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        train(MODELS[name])
    assert torch.cuda.memory_allocated() == before

"""Looking at a model on a GPU: no kernel, memory or draw; what measures leaves generators and buffers as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.fuser.show.explain import Explanation
from tests.looking import plans_that_run


def model_and_input() -> tuple[Sequential, torch.Tensor]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(256, 256), nn.BatchNorm1d(256), nn.Dropout(0.5))
    listed = [ops.LayerNorm(256), ops.Linear(256, 256), plain, ops.GELU(), ops.Linear(256, 128)]
    model = Sequential(*listed).cuda()
    nn.utils.parametrizations.spectral_norm(model[4])
    return model, torch.randn(512, 256, device="cuda", requires_grad=True)


def state_of(model: Sequential) -> list[Any]:
    tensors = [*model.parameters(), *model.buffers()]
    held = [(id(t), t._version, t.detach().clone()) for t in tensors]
    return [torch.cuda.get_rng_state(), torch.get_rng_state(), *(part for entry in held for part in entry)]


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(a, b) if isinstance(b, torch.Tensor) else a == b


@pytest.mark.parametrize("amp", [False, True])
def test_the_plans_shown_are_those_that_run(amp: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = model_and_input()
    ran, before = plans_that_run(monkeypatch), state_of(model)
    with torch.autocast("cuda", torch.bfloat16, enabled=amp):
        model_and_input()[0].plans(x)  # the first look in a process makes PyTorch take some memory of its own
        torch.cuda.synchronize()
        allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
        shown = model.plans(x)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated
        assert_same(state_of(model), before)
        model(x).float().sum().backward()
        assert str(Explanation(shown)) == str(Explanation(ran))
        assert str(Explanation(model.plans(x))) == str(Explanation(ran))


@pytest.mark.parametrize("what", ["measure", "tune"])
def test_measuring_leaves_the_model_as_it_was(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    model, x = model_and_input()
    model(x).sum().backward()
    gradients, before = [p.grad.clone() for p in model.parameters() if p.grad is not None], state_of(model)
    model.explain(x, measure=True, details=True) if what == "measure" else model.tune(x, rounds=1, seconds=0.001)
    assert_same(state_of(model), before)
    assert_same([p.grad for p in model.parameters() if p.grad is not None], gradients)

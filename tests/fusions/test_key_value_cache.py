"""Caches in plans for a GPU: where the kernel that writes them is taken, what it gives, why not elsewhere."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fusions.match import Match
from tests.fake_cuda import Emulation, FakeDriver
from tests.fusions.decoding import cache, inputs, planned, reasons
from tests.needs import needs_compiler

NAME = "key_value_cache"


def rows(positions: int, samples: int = 3, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(positions, samples, 192, generator=torch.Generator().manual_seed(positions)).to(dtype)


def given(**options: object) -> dict[str, torch.Tensor]:
    return {name: t for name, t in inputs(**options).items() if name != "filled"}  # type: ignore[arg-type]


def test_one_pass() -> None:
    (step,) = planned(rows(5), given(), cache()).forward
    assert step.name == NAME and step.cost.read == step.cost.written >= 5 * 3 * 192 * 2


def test_what_it_does_not_take() -> None:
    small = ops.KeyValueCache(4, heads=32, kv_heads=8)
    (reason,) = reasons(planned(rows(2), given(), small), NAME)
    assert reason == "it moves 16 bytes at once, and a head has 8"
    mixed = {**given(), "counts": torch.ones(3, dtype=torch.int32)}
    (reason,) = reasons(planned(rows(2), mixed, cache()), NAME)
    assert reason == "it takes starts and counts of one dtype, they are int64 and int32"


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, emulation: Emulation) -> Iterator[FakeDriver]:
    """Plans take the kernel, and an emulated driver runs it."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    with emulation.in_plans():
        yield driver


@needs_compiler
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@torch.no_grad()
def test_values_in_plans(packing: str, played: FakeDriver) -> None:
    """Caches where they lie: whole, some of their samples, and with steps that the kernel cannot make."""
    model = te_fuser.Sequential(cache(packing=packing), kernels="generated")
    x = rows(3, 2)
    for wider in ((41, 2, 32), (41, 5, 32), (41, 2, 36)):
        ours = {
            **given(samples=2),
            **{n: torch.zeros(wider).bfloat16()[:, :2, :32] for n in ("key_cache", "value_cache")},
        }
        theirs = {name: t.clone() for name, t in ours.items()}
        assert [s.name for s in model.plan(x, **ours).forward] == [NAME]
        want = model.reference(x, **theirs)
        versions = [ours[name]._version for name in ("key_cache", "value_cache")]
        assert torch.equal(model(x, **ours), want)
        for name, version in zip(("key_cache", "value_cache"), versions, strict=True):
            assert torch.equal(ours[name], theirs[name]) and ours[name]._version > version

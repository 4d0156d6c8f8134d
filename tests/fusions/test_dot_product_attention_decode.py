"""Caches and attention of one query a sample in plans of decoding, on a GPU that a CPU stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.fake_cuda import FakeDriver
from tests.fusions.decoding import MASK, attention, cache, inputs
from tests.needs import needs_compiler

pytestmark = needs_compiler
CACHES = ("key_cache", "value_cache")


def rows(positions: int, samples: int) -> torch.Tensor:
    return torch.randn(positions, samples, 192, generator=torch.Generator().manual_seed(positions)).bfloat16()


@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
@torch.no_grad()
def test_caches_are_written_where_they_lie(packing: str, played: FakeDriver) -> None:
    """Whole ones, some of their samples, and with steps that the kernel cannot make."""
    model = te_fuser.Sequential(cache(packing=packing), kernels="generated")
    x = rows(3, 2)
    for wider in ((41, 2, 32), (41, 5, 32), (41, 2, 36)):
        ours = {name: t for name, t in inputs(samples=2).items() if name != "filled"}
        ours |= {name: torch.zeros(wider).bfloat16()[:, :2, :32] for name in CACHES}
        theirs = {name: t.clone() for name, t in ours.items()}
        assert [s.name for s in model.plan(x, **ours).forward] == ["key_value_cache"]
        want = model.reference(x, **theirs)
        versions = [ours[name]._version for name in CACHES]
        assert torch.equal(model(x, **ours), want)
        for name, version in zip(CACHES, versions, strict=True):
            assert torch.equal(ours[name], theirs[name]) and ours[name]._version > version


@pytest.mark.parametrize("window", [None, (9, 0)])
@torch.no_grad()
def test_one_query_errs_no_more_than_twice_pytorch(window: Any, played: FakeDriver) -> None:
    mask = ops.AttentionMask(**MASK, window=window)
    model = te_fuser.Sequential(cache(), attention(mask), kernels="generated")
    x, ours = rows(1, 3), inputs()
    exact = {name: t.double() if t.is_floating_point() else t for name, t in ours.items()}
    want = model.reference(x.double(), **exact)
    plain = model.reference(x, **{name: t.clone() for name, t in ours.items()})
    assert [s.name for s in model.plan(x, **ours).forward] == ["key_value_cache", "one_query_attention"]
    allowed = 2 * (plain.double() - want).abs().max()
    assert (model(x, **ours).double() - want).abs().max() <= allowed
    for name in CACHES:
        assert torch.equal(ours[name][:-1].double(), exact[name][:-1])

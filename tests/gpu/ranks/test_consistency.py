"""Ranks that are about to run different things together: all raise before anything is sent, and go on together."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.distributed.consistency import RankMismatchError
from tests.gpu.ranks.models import device
from tests.parallel.ranks import on_ranks

F = 64


def total() -> float:
    found = torch.ones(1, device=device())
    dist.all_reduce(found)
    return found.item()


@on_ranks
def test_a_difference_and_an_error_come_to_all() -> None:
    last, world = dist.get_rank() == dist.get_world_size() - 1, dist.get_world_size()
    model = te_fuser.Sequential(ops.LayerNorm(F), ops.AllGather(dist.group.WORLD), ops.Linear(F, F)).to(device())
    rows = torch.randn(8, F, device=device())
    with pytest.raises(RankMismatchError, match=r"rank 0 has x \[8, 64\] .*; rank \d has x \[16, 64\]"):
        model(torch.randn(16, F, device=device()) if last else rows)
    assert total() == world
    with pytest.raises(ValueError if last else RankMismatchError, match="op 0"):
        model(torch.randn(8, F + 1, device=device()) if last else rows)
    assert total() == world
    y = model(rows)
    y.sum().backward()
    assert y.shape == (8 * world, F) and y.isfinite().all()

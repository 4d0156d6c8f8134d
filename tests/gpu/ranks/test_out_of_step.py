"""A rank that waits in a collective of what it knows, while another one is ready with something else."""

from __future__ import annotations

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.config import config
from te_fuser.distributed.telling import Disagreement
from tests.gpu.ranks.models import by_nccl, device
from tests.parallel.ranks import on_ranks

pytestmark = pytest.mark.gpu
F = 64
PATIENCE = 6.0


@pytest.mark.parametrize("way", ["calls", "replays"])
@on_ranks
def test_all_raise_and_other_groups_go_on(way: str) -> None:
    """In words, on all, long before the group's timeout by NCCL; then nothing runs in that group any more.

    All but the last are in the collective, so of four ranks three hear of one another.
    """
    if way == "replays" and not by_nccl():
        return
    with mock.patch.object(config, "patience", PATIENCE):
        out_of_step(dist.new_group(range(dist.get_world_size()), timedelta(seconds=60.0 if by_nccl() else 8.0)), way)
    total = torch.ones(1, device=device())
    dist.all_reduce(total)
    assert total.item() == dist.get_world_size()


def out_of_step(group: dist.ProcessGroup, way: str) -> None:
    model = te_fuser.Sequential(ops.LayerNorm(F), ops.AllGather(group), ops.Linear(F, F)).to(device())
    rows = torch.randn(8, F, device=device())
    model(rows).sum().backward()
    known = te_fuser.cuda_graph(model, rows) if way == "replays" else model
    for _ in range(2):
        known(rows)
    with pytest.raises(Disagreement, match=r"rank \d of .* waits in a collective of what .*, while rank"):
        if dist.get_rank() < dist.get_world_size() - 1:
            for _ in range(3):
                known(rows)
                settled()
        else:
            model(torch.randn(16, F, device=device()))
    with pytest.raises(Disagreement, match="Nothing runs in group"):
        known(rows)
    assert rows.sum().isfinite()


def settled() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()

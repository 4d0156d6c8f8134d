"""Models that DistributedDataParallel and fully_shard wrap, whose ranks exchange by copy engines."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from te_fuser.distributed.group import Group
from te_fuser.kernels import peers
from te_fuser.parallel import use_copy_engines
from tests.gpu.ranks.models import assert_near, batch, device, layers, mesh, own, whole
from tests.parallel.ranks import on_ranks
from tests.peers import standing_in

pytestmark = pytest.mark.gpu
STEPS = 6


def wrapped(how: str, m: nn.Module) -> nn.Module:
    if how == "DDP":
        return DistributedDataParallel(m, gradient_as_bucket_view=True, bucket_cap_mb=1)
    for layer in m.children():
        fully_shard(layer, mesh=mesh())
    return fully_shard(m, mesh=mesh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", ["DDP", "fully_shard"])
@on_ranks
def test_gradients_are_those_of_nccl(how: str) -> None:
    """But for rounding, over steps whose exchanges run beside backward."""
    on_gpu = device() == "cuda"
    group, place = (
        Group.of("a test", dist.group.WORLD),
        torch.device(device(), torch.cuda.current_device() if on_gpu else 0),
    )
    if on_gpu and peers.obstacle(group, place) is not None:  # ranks that share a GPU
        return
    with contextlib.nullcontext() if on_gpu else standing_in():
        twin = wrapped(how, layers())
        shared = wrapped(how, copy.deepcopy(layers()))
        use_copy_engines(shared)
        for step in range(STEPS):
            x, dy = (own(batch(seed), 1).contiguous() for seed in (step, step + 50))
            for m in (twin, shared):
                m.zero_grad()
                m(x).backward(dy)
            for p, q in zip(shared.parameters(), twin.parameters(), strict=True):
                assert_near(whole(p.grad), whole(q.grad))

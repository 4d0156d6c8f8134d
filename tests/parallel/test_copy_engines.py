"""Models that DistributedDataParallel and fully_shard wrap, whose ranks exchange by copy engines."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from te_fuser import ops
from te_fuser.parallel import use_copy_engines
from te_fuser.parallel.copy_engines import _ReduceScatter
from tests.parallel.ranks import on_ranks
from tests.peers import standing_in

F = 7  # features of which buckets cannot be cut into equal blocks


def model() -> te_fuser.Sequential:
    torch.manual_seed(0)
    layers = (
        te_fuser.Sequential(ops.LayerNorm(F), ops.Linear(F, 3 * F), ops.GELU(), ops.Linear(3 * F, F)) for _ in "ab"
    )
    return te_fuser.Sequential(*layers)


def batch(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(5, F, generator=torch.Generator().manual_seed(31 * step + rank))


def wrapped(how: str, m: nn.Module) -> nn.Module:
    if how == "DDP":
        return DistributedDataParallel(m, bucket_cap_mb=1e-3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in m.children():
        fully_shard(layer, mesh=mesh)
    return fully_shard(m, mesh=mesh)  # type: ignore[no-any-return]


def gradients(m: nn.Module) -> list[torch.Tensor]:
    found: list[Any] = [p.grad for p in m.parameters()]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in found]


@pytest.mark.parametrize("how", ["DDP", "fully_shard"])
@on_ranks
def test_gradients_are_the_mean_over_ranks(how: str) -> None:
    """Held against all batches in float64, over steps, the second of which has other buckets."""
    exact = model().double()
    with standing_in() as driver:
        shared = wrapped(how, model())
        use_copy_engines(shared)
        for step in range(3):
            exact.zero_grad()
            shared.zero_grad()
            loss = torch.stack(
                [exact.reference(batch(r, step).double()).square().sum() for r in range(dist.get_world_size())]
            )
            loss.mean().backward()
            shared(batch(dist.get_rank(), step)).square().sum().backward()
            for got, p in zip(gradients(shared), exact.parameters(), strict=True):
                assert p.grad is not None
                torch.testing.assert_close(got.double(), p.grad, rtol=1e-5, atol=1e-5)
        assert driver.copies > 0


@on_ranks
def test_no_collective_moves_gradients() -> None:
    """Neither a reduction nor a gather of the process group."""
    with standing_in(), pytest.MonkeyPatch.context() as patch:
        shared = wrapped("fully_shard", model())
        use_copy_engines(shared)
        shared(batch(0)).sum().backward()

        def refuse(*_: Any, **__: Any) -> None:
            raise AssertionError("a collective ran")

        for name in ("allreduce", "_allgather_base", "_reduce_scatter_base"):
            patch.setattr(dist.ProcessGroup, name, refuse)
        shared(batch(0)).sum().backward()


@on_ranks
def test_what_cannot_be_is_said() -> None:
    with pytest.raises(TypeError, match="that DistributedDataParallel or fully_shard wraps, got Sequential: wrap it"):
        use_copy_engines(model())
    on_cpu = wrapped("DDP", copy.deepcopy(model()))
    use_copy_engines(on_cpu)
    with pytest.raises(RuntimeError, match="copy engines are of GPUs, the input is on cpu; without it NCCL"):
        on_cpu(batch(0)).sum().backward()
    with standing_in(), pytest.raises(ValueError, match="are added up or averaged, fully_shard asks for"):
        _ReduceScatter()(torch.empty(3), batch(0).flatten()[:6], dist.group.WORLD, dist.ReduceOp.MAX)

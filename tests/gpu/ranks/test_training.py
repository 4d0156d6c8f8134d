"""Lists that ranks share by `parallelize`: results, memory over many steps, checkpoints, CUDA graphs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from tests.gpu.ranks.models import assert_alike, assert_near, backward, batch, by_nccl, device, layers, mesh, own, whole
from tests.parallel.ranks import on_ranks


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_parallelize(gated: bool, dropout: float, sequence_parallel: bool) -> None:
    twin = layers(dropout=dropout, gated=gated)
    model = te_fuser.parallelize(copy.deepcopy(twin), mesh(), sequence_parallel=sequence_parallel)
    x, dy = batch(1), batch(2)
    want = backward(twin, x, dy)
    got = backward(model, *((own(x), own(dy)) if sequence_parallel else (x, dy)))
    for name, g, w in zip(("y", "dx"), got, want, strict=True):
        assert_near(g, own(w) if sequence_parallel else w, name)
    assert_alike(model, twin)


@pytest.mark.parametrize("how", ["DDP", "tensor", "FSDP2"])
@on_ranks
def test_memory_stays_as_it_is_over_many_steps(how: str) -> None:
    model: Any = layers(dropout=0.1)
    if how == "tensor":
        model = te_fuser.parallelize(model, mesh(), sequence_parallel=True)
    elif how == "DDP":
        model = DistributedDataParallel(model, [torch.cuda.current_device()] if device() == "cuda" else None)
    else:
        for part in (*model, model):
            fully_shard(part, mesh=mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    x, used, count = own(batch(dist.get_rank())).contiguous(), list[int](), 200 if by_nccl() else 8
    for step in range(count):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        if device() == "cuda" and step in (count // 4, count - 1):
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert loss.isfinite() and len(set(used)) <= 1, used


@on_ranks
def test_checkpoints(tmp_path: Path) -> None:
    """Training resumed from a checkpoint goes on as if nothing had been."""

    def train(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[torch.Tensor]:
        losses = []
        for step in steps:
            optimizer.zero_grad()
            loss = model(own(batch(step))).float().square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    def fresh() -> tuple[Any, torch.optim.Optimizer]:
        model = te_fuser.parallelize(layers(gated=True), mesh(), sequence_parallel=True)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    model, optimizer = fresh()
    train(model, optimizer, range(2))
    parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(parts, checkpoint_id=tmp_path)
    want = train(model, optimizer, range(2, 4))
    other, optimizer = fresh()
    parts = dict(zip(("model", "optimizer"), get_state_dict(other, optimizer), strict=True))
    dcp.load(parts, checkpoint_id=tmp_path)
    set_state_dict(other, optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    torch.testing.assert_close(train(other, optimizer, range(2, 4)), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_replays_equal_calls(sequence_parallel: bool) -> None:
    if not by_nccl():  # collectives through the host are in no graph
        return
    model = te_fuser.parallelize(layers(), mesh(), sequence_parallel=sequence_parallel)
    cut = own if sequence_parallel else lambda t: t
    sample = cut(batch(0)).contiguous().requires_grad_()
    model(sample).sum().backward()  # communicators exist before the capture
    replayed = te_fuser.cuda_graph(model, sample)
    for seed in range(1, 4):
        x, dy = cut(batch(seed)).contiguous(), cut(batch(-seed % 97)).contiguous()
        model.zero_grad()
        want = backward(model, x, dy)
        gradients = [whole(p.grad).clone() for p in model.parameters()]
        model.zero_grad()
        got = backward(replayed, x, dy)
        for g, w in zip([*got, *(whole(p.grad) for p in model.parameters())], [*want, *gradients], strict=True):
            assert_near(g, w)

"""Ranks that share a model, or sequences, and others that train it with other samples; on 2 ranks each by itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from te_fuser.parallel import cut_sequence
from tests.gpu.ranks.models import assert_alike, assert_near, backward, batch, device, layers, mesh, own, whole
from tests.gpu.ranks.test_presets import NO_DROPOUT, make, mine, numbered
from tests.parallel.ranks import on_ranks


def two(*names: str) -> DeviceMesh:
    """Of two ranks the second dimension has one."""
    ranks = dist.get_world_size()
    return init_device_mesh(device(), (2, ranks // 2), mesh_dim_names=names)


def samples(t: torch.Tensor, dp: DeviceMesh) -> torch.Tensor:
    return own(t, 1, dp).contiguous()


def rows(t: torch.Tensor, tp: DeviceMesh) -> torch.Tensor:
    return own(t, 0, tp).contiguous()


@on_ranks
def test_fully_shard() -> None:
    """Each rank's loss is the mean over its samples, so gradients are the mean over ranks of dp."""
    grid, twin = two("dp", "tp"), layers(gated=True)
    model: Any = te_fuser.parallelize(copy.deepcopy(twin), grid["tp"], sequence_parallel=True)
    for part in (*model, model):
        fully_shard(part, mesh=grid["dp"])
    for seed in range(2):
        x, dy = batch(seed), batch(seed + 50)
        model.zero_grad()
        twin.zero_grad()
        want = backward(twin, x, dy)
        got = backward(model, *(rows(samples(t, grid["dp"]), grid["tp"]) for t in (x, 2 * dy)))
        assert_near(got[0], rows(samples(want[0], grid["dp"]), grid["tp"]), "y")
        assert_near(got[1], 2 * rows(samples(want[1], grid["dp"]), grid["tp"]), "dx")
        assert_alike(model, twin)


@on_ranks
def test_ddp() -> None:
    """Of a layer by Transformer Engine's arguments, whose parameters are plain."""
    grid = two("dp", "tp")
    twin = make("TransformerLayer", **NO_DROPOUT)
    tp = grid["tp"]
    shared = {"tp_group": tp.get_group(), "set_parallel_mode": True, "sequence_parallel": True} if tp.size() > 1 else {}
    layer = make("TransformerLayer", **NO_DROPOUT, **shared)
    with torch.no_grad():
        for n, p in twin.named_parameters():
            p.copy_(numbered(n, *p.shape))
        wholes = dict(twin.named_parameters())
        for n, p in layer.named_parameters():
            p.copy_(mine(wholes[n], p, 1, tp))
    devices = [torch.cuda.current_device()] if device() == "cuda" else None
    model = DistributedDataParallel(layer, devices, process_group=grid["dp"].get_group(), bucket_cap_mb=1)
    for seed in range(2):
        x, dy = batch(seed), batch(seed + 50)
        model.zero_grad()
        twin.zero_grad()
        want = backward(twin, x, dy)
        got = backward(model, *(rows(samples(t, grid["dp"]), tp) for t in (x, 2 * dy)))
        assert_near(got[0], rows(samples(want[0], grid["dp"]), tp), "y")
        for n, p in layer.named_parameters():
            assert p.grad is not None and wholes[n].grad is not None
            if "key_bias" not in n:
                assert_near(p.grad, mine(wholes[n].grad, p, 1, tp), n)


@pytest.mark.parametrize("dropout", [0.0, 0.2])
@on_ranks
def test_sequences_that_ranks_cut(dropout: float) -> None:
    """AllToAll around attention; of four ranks two share weights, too."""
    grid, twin = two("cp", "tp"), layers(dropout=dropout)
    tp, cp = grid["tp"], grid["cp"]
    given = {"sequence_parallel": True} if tp.size() > 1 else {}
    model = te_fuser.parallelize(copy.deepcopy(twin), tp if given else None, **given, context=cp)

    def cut(t: torch.Tensor) -> torch.Tensor:
        return rows(cut_sequence(t, cp), tp)

    x, dy = batch(1), batch(51)
    want = backward(twin, x, dy)
    got = backward(model, cut(x), cut(dy))
    for name, g, w in zip(("y", "dx"), got, want, strict=True):
        assert_near(g, cut(w), name)
    assert_alike(model, twin, cp.get_group())


@on_ranks
def test_activations_that_ranks_keep_together_and_second_derivatives() -> None:
    twin = layers(dropout=0.1)
    model = te_fuser.parallelize(copy.deepcopy(twin), mesh())
    x, dy = batch(1), batch(51)
    want = backward(twin, x, dy)

    def checkpointed(t: torch.Tensor) -> torch.Tensor:
        return te_fuser.checkpoint(model, t, distribute_saved_activations=True)  # type: ignore[no-any-return]

    for g, w in zip(backward(checkpointed, x, dy), want, strict=True):
        assert_near(g, w)
    assert_alike(model, twin)
    cut = te_fuser.parallelize(copy.deepcopy(twin), mesh(), sequence_parallel=True).eval()
    found = []
    for m, t in ((cut, own(x)), (twin.eval(), x)):
        m.float().zero_grad()
        t = t.detach().float().requires_grad_()
        (dx,) = torch.autograd.grad(m.reference(t).square().sum(), t, create_graph=True)
        dx.square().sum().backward()
        found.append([t.grad, *(whole(p.grad) for p in m.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1])
    assert_near(found[0][0], own(found[1][0]), "x")
    assert_near(found[0][1], found[1][1], "norm")

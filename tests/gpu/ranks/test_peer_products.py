"""Exchanges by copy engines: what they move against NCCL's, and products beside them against the whole list."""

from __future__ import annotations

import contextlib
import copy
import os
import random
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import fusions, ops
from te_fuser.distributed.exchange import ByProcessGroup, Transport
from te_fuser.kernels import peers
from tests.gpu.ranks.models import assert_alike, assert_near, backward, batch, by_nccl, device, mesh, mlps, own
from tests.parallel.ranks import on_ranks
from tests.peers import standing_in

FORWARD = ["gather_matmul_bias_gelu_aux", "scatter_matmul"]
BACKWARD = {"gather_gelu_matmul_backward", "scatter_matmul_bias_backward"}


@contextlib.contextmanager
def exchanging() -> Iterator[None]:
    """In here copies run; on CPUs what stands for GPUs."""
    with contextlib.nullcontext() if device() == "cuda" else standing_in():
        yield


def world() -> ops.Group:
    return ops.Group.of("a test", dist.group.WORLD)


def place() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if device() == "cuda" else torch.device("cpu")


def moved(by: Transport, kind: str, x: torch.Tensor) -> torch.Tensor:
    """Result of an exchange."""
    ranks = world().size
    rows = x.shape[0] * ranks if kind == "gather" else x.shape[0] // ranks if kind == "scatter" else x.shape[0]
    made = x.new_full((rows, *x.shape[1:]), torch.nan)
    getattr(by, kind)(x, made).wait()
    return made


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks
def test_they_equal_those_of_nccl(dtype: torch.dtype) -> None:
    """Bit for bit where they move; where they add up, by one rounding of each."""
    group, generator = world(), random.Random(5)
    with exchanging():
        by = peers.PeersOf(group, place()).transport()
        for number in range(60):
            rows, features = group.size * generator.randrange(1, 300), generator.choice((1, 3, 8, 40, 1024))
            x = torch.randn(rows, features, generator=torch.Generator().manual_seed(7 * number + group.rank))
            x = x.to(place(), dtype)
            for kind in ("gather", "swap"):
                if kind == "swap" and dist.get_backend() == "gloo" and dtype == torch.bfloat16:
                    continue
                assert torch.equal(moved(by, kind, x), moved(ByProcessGroup(group), kind, x))
            exact, terms = (moved(ByProcessGroup(group), "scatter", t.double()) for t in (x, x.abs()))
            ours, theirs = (moved(b, "scatter", x).double() for b in (by, ByProcessGroup(group)))
            eps, single = torch.finfo(dtype).eps, torch.finfo(torch.float32).eps
            assert bool(((ours - exact).abs() <= eps * exact.abs() + group.size * single * terms).all())
            assert bool(((theirs - exact).abs() <= group.size * eps * terms).all())  # which rounds each of its sums


@on_ranks
def test_ten_thousand_in_a_row() -> None:
    """Of any size, in an order of their own, beside products; what arrives says from whom and which it is."""
    group, generator = world(), random.Random(3)
    with exchanging():
        by, under_way, here = peers.PeersOf(group, place()).transport(), [], place()
        w = torch.randn(512, 512, device=here)
        for number in range(10_000 if device() == "cuda" else 300):
            kind, rows = generator.choice(("gather", "swap", "scatter")), generator.randrange(1, 200)
            features = generator.randrange(1, 70)
            size = rows if kind == "gather" else rows * group.size
            x = torch.full((size, features), float(number % 1000 + 1) * (group.rank + 1), device=here)
            made = x.new_empty(rows if kind == "scatter" else rows * group.size, features)
            under_way.append((number, kind, rows, x, made, getattr(by, kind)(x, made)))
            if number % 3 == 0:
                torch.mm(w, w)
            if len(under_way) > generator.randrange(3):
                number, kind, rows, x, made, work = under_way.pop(generator.randrange(len(under_way)))
                work.wait()
                each = [float(number % 1000 + 1) * (rank + 1) for rank in range(group.size)]
                want = [sum(each)] if kind == "scatter" else each
                wrong = made != torch.tensor(want, device=here).repeat_interleave(rows)[:, None]
                assert not bool(wrong.any()), number
        for *_, work in under_way:
            work.wait()


@pytest.mark.parametrize("memory", ["fast", "lean"])
@on_ranks
def test_as_the_whole_list(memory: str) -> None:
    """Both directions, over calls of growing sizes, which want larger buffers; then replayed."""
    twin = mlps(memory=memory)
    model = te_fuser.parallelize(copy.deepcopy(twin), mesh(), sequence_parallel=True)
    for part, seed in ((2, 1), (1, 2), (1, 3)):
        x, dy = (t[: len(t) // part] for t in (batch(seed), batch(seed + 50)))
        plan = model.plan(own(x).contiguous().requires_grad_())
        if device() == "cuda":
            assert [s.name for s in plan.forward if s.name in FORWARD] == 2 * FORWARD
            assert {s.name for s in plan.backward} >= BACKWARD
        model.zero_grad()
        got = backward(model, own(x).contiguous(), own(dy).contiguous())
        twin.zero_grad()
        want = backward(twin, x, dy)
        for name, g, w in zip(("y", "dx"), got, want, strict=True):
            assert_near(g, own(w), name)
        assert_alike(model, twin)
    if by_nccl():
        replayed = te_fuser.cuda_graph(model, own(x).contiguous().requires_grad_())
        for seed in (4, 5, 6):  # in between the model itself, by the same buffers
            x, dy = batch(seed), batch(seed + 50)
            for run in (replayed, model, replayed):
                for g, w in zip(backward(run, own(x), own(dy)), backward(twin, x, dy), strict=True):
                    assert_near(g, own(w))


@on_ranks
def test_without_copies() -> None:
    """By NCCL the same list gives the same but for the rounding of sums."""
    model = te_fuser.parallelize(mlps(1), mesh(), sequence_parallel=True)
    x, dy = (own(batch(seed)).contiguous() for seed in (1, 2))
    with fusions.disabled(fusions.PEER_COPIES):
        want = backward(model, x, dy)
        assert any(s.name == "all_gather.start" for s in model.plan(x.clone().requires_grad_()).forward)
    for g, w in zip(backward(model, x, dy), want, strict=True):
        assert_near(g, w)


@on_ranks
def test_by_no_multicast() -> None:
    group = world()
    if device() == "cuda":
        memory, addresses = peers.allocate(group, 1 << 16, place())
        found = peers._symmetric_memory().rendezvous(memory, group.name)
        assert found.multicast_ptr == 0 and len(addresses) == group.size
        assert peers.obstacle(group, place()) is None
    with mock.patch.dict(os.environ, {peers.MULTICAST: "0"}):
        with pytest.raises(RuntimeError, match="asks for NVLink multicast, which is not used here"):
            peers._symmetric_allocation(group, 1 << 16, place())
        why = peers.obstacle(group, place())
        assert why is not None and (device() == "cpu" or "asks for NVLink multicast" in why)

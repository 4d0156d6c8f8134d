"""Transfers that are under way while other steps run: their memory is held, so results are as one by one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser.distributed.exchange import Exchange, Transport, UnderWay
from te_fuser.distributed.group import Group
from te_fuser.fuser.plan.device import capturing
from tests.gpu.ranks.models import SIZES, backward, batch, by_nccl, device, mesh, mlps, own
from tests.parallel.ranks import on_ranks

STEPS = 5
begin, finish = Exchange.start, Exchange.wait


def settled() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


@contextmanager
def one_by_one() -> Iterator[None]:
    """In here nothing else runs while ranks exchange."""

    def start(self: Exchange, x: torch.Tensor, group: Group, by: Transport | None = None) -> UnderWay:
        settled()
        started = begin(self, x, group, by)
        started.work.wait()
        settled()
        return started

    with mock.patch.object(Exchange, "start", start):
        yield


def scribble() -> None:
    """Write into memory that is free."""
    hidden, inner, _, positions, samples = SIZES[device()]
    rows = positions * samples
    sizes = [rows * hidden, rows * inner, hidden * inner, hidden, 4 * hidden]
    held = [torch.full((n // k,), torch.nan, device=device(), dtype=torch.bfloat16) for n in sizes for k in (1, 2, 4)]
    held.clear()


@contextmanager
def scribbling() -> Iterator[None]:
    """In here all that nobody holds is written to while ranks exchange."""

    def start(self: Exchange, x: torch.Tensor, group: Group, by: Transport | None = None) -> UnderWay:
        y = begin(self, x, group, by)
        del x
        scribble()
        return y

    def wait(self: Exchange, started: UnderWay, *given: Any) -> torch.Tensor:
        scribble()
        return finish(self, started, *given)

    with mock.patch.multiple(Exchange, start=start, wait=wait):
        yield


def step(model: Any, call: Any, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    y, dx = backward(call, x, dy)
    return {"y": y.clone(), "dx": dx, **{name: p.grad.to_local().clone() for name, p in model.named_parameters()}}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    differ = [name for name, t in got.items() if not torch.equal(t, want[name])]
    assert not differ and all(t.isfinite().all() for t in want.values()), differ


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("memory", ["fast", "lean"])
@on_ranks
def test_results_are_as_one_by_one(memory: str, sequence_parallel: bool) -> None:
    """Bit for bit, over steps of other data."""
    model = te_fuser.parallelize(mlps(dropout=0.1, memory=memory), mesh(), sequence_parallel)
    for seed in range(STEPS):
        x, dy = (own(t).contiguous() if sequence_parallel else t for t in (batch(seed), batch(seed + 50)))
        with one_by_one():
            want = step(model, model, x, dy)
        with scribbling():
            assert_equal(step(model, model, x, dy), want)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks
def test_replays_are_as_one_by_one(sequence_parallel: bool) -> None:
    """Of a captured graph, while others' memory is written to."""
    if not by_nccl():  # collectives through the host are in no graph
        return
    model = te_fuser.parallelize(mlps(), mesh(), sequence_parallel)
    twin = copy.deepcopy(model)
    cut = own if sequence_parallel else lambda t: t
    replayed = te_fuser.cuda_graph(model, cut(batch(0)).contiguous().requires_grad_())
    for seed in range(STEPS):
        x, dy = (cut(t).contiguous() for t in (batch(seed), batch(seed + 50)))
        token = capturing.set(True)  # by the plan that captures have
        with one_by_one():
            want = step(twin, twin, x, dy)
        capturing.reset(token)
        got = step(model, replayed, x, dy)
        scribble()
        assert_equal(got, want)

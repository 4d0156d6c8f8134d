"""Models in DistributedDataParallel: gradients are those of one process with the whole batch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from te_fuser import ops
from te_fuser.fuser.plan import finish
from te_fuser.fuser.run import watched
from tests.parallel.models import (
    FEATURES,
    MODELS,
    assert_as_one_process,
    backward,
    gradients,
    own,
    plain_list,
    residual_layers,
    whole_batch,
)
from tests.parallel.ranks import WORLD, on_ranks
from tests.twins import sequential

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, "default") for kind in MODELS),
        *((k, o) for o in OPTIONS if o != "default" for k in ("list", "checkpoint")),
    ],
)
@on_ranks
def test_gradients(kind: str, options: str) -> None:
    model, twin = MODELS[kind](), MODELS[kind]()
    parallel = DistributedDataParallel(model, **OPTIONS[options])
    for step in range(3):
        x = whole_batch(step)
        for m, part in ((parallel, own(x)), (twin, x)):
            m.zero_grad()
            backward(m, part)
        assert_as_one_process(parallel, twin)


@pytest.mark.parametrize("options", OPTIONS)
@on_ranks
def test_no_sync(options: str) -> None:
    """Of several micro-batches the last one sums over the ranks what all have added."""
    model, twin = residual_layers(), residual_layers()
    parallel = DistributedDataParallel(model, **OPTIONS[options])
    backward(parallel, own(whole_batch()))  # static_graph learns here; PyTorch takes no no_sync before
    for step in range(2):
        for m in (parallel, twin):
            m.zero_grad()
        for micro in range(3):
            x = whole_batch(3 * step + micro)
            backward(twin, x)
            with parallel.no_sync() if micro < 2 else nullcontext():
                backward(parallel, own(x))
        assert_as_one_process(parallel, twin)


class Branches(nn.Module):
    """One of them is in no call; the other reads one of two results."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = plain_list(), plain_list()
        self.both = sequential(ops.Linear(FEATURES, FEATURES), ops.Output("middle"), ops.Linear(FEATURES, FEATURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, middle = self.both(self.used(x), outputs=("middle",))
        return middle


@on_ranks
def test_parameters_that_nothing_reaches() -> None:
    model, twin = Branches(), Branches()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    for step in range(2):
        x = whole_batch(step)
        for m, part in ((parallel, own(x)), (twin, x)):
            m.zero_grad()
            backward(m, part)
        assert_as_one_process(parallel, twin)
    assert gradients(parallel)["unused.1.weight"] is None


@contextmanager
def small_segments(events: list[str]) -> Iterator[None]:
    """In here lists are cut wherever they may be; each backward of a segment is an event."""

    def run(program: Any, slots: Any, *rest: Any, **how: Any) -> None:
        ran(program, slots, *rest, **how)
        if rest:
            events.append("segment")

    ran = watched.run
    small = mock.patch.multiple(finish, SEGMENT_BYTES=1, WORTH_A_NODE=0)
    with small, mock.patch.object(watched, "run", run):
        yield


@on_ranks
def test_hooks_fire_between_segments() -> None:
    """So the ranks sum the gradients of the last layers while those of the first ones are not there yet."""
    events: list[str] = []
    with small_segments(events):
        model, twin = residual_layers(), residual_layers()
        parallel = DistributedDataParallel(model, bucket_cap_mb=1e-4)

        def summed(state, bucket):  # DDP refuses annotations that are text
            events.append("sum")
            work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return work.then(lambda done: done.value()[0] / WORLD)

        parallel.register_comm_hook(None, summed)
        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
        for step in range(2):  # DDP orders its buckets by the first
            x = whole_batch(step)
            events.clear()
            for m, part in ((parallel, own(x)), (twin, x)):
                m.zero_grad()
                backward(m, part)
        segments = len(model.plan(own(whole_batch())).segments)
    backwards = events[: len(events) - segments]  # without the twin's
    assert backwards.count("segment") == segments > 3
    ends = [k for k, event in enumerate(backwards) if event == "segment"]
    for end, following in zip(ends, [*ends[1:], len(backwards)], strict=True):
        assert following > end + 1, "a segment whose parameters got their gradients later"
    assert "sum" in backwards[: ends[1]], "nothing was summed before the second segment ran"
    assert_as_one_process(parallel, twin)

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

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.run import segment
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from tests.parallel.models import (
    FEATURES,
    MODELS,
    assert_as_one_process,
    assert_step_as_one_process,
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
        assert_step_as_one_process(parallel, twin, step)


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
        assert_step_as_one_process(parallel, twin, step)
    assert gradients(parallel)["unused.1.weight"] is None


@contextmanager
def small_segments(events: list[str]) -> Iterator[None]:
    """In here lists are cut wherever they may be; each backward of a segment is an event."""

    def run(program: Any, slots: Any, *rest: Any, **how: Any) -> None:
        ran(program, slots, *rest, **how)
        if rest:
            events.append("segment")

    ran = segment.run_program
    small = mock.patch.multiple(segmenting, SEGMENT_BYTES=1, WORTH_A_NODE=0)
    with small, mock.patch.object(segment, "run_program", run):
        yield


def noted(model: nn.Module, events: list[str]) -> DistributedDataParallel:
    """The model on all ranks; each gradient, and each sum of some, is an event."""
    parallel = DistributedDataParallel(model, bucket_cap_mb=1e-4)

    def summed(state, bucket):  # DDP refuses annotations that are text
        events.append("sum")
        work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda done: done.value()[0] / WORLD)

    parallel.register_comm_hook(None, summed)
    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: events.append(name))
    return parallel


def assert_summed_in_between(backwards: list[str], segments: int) -> None:
    """Each segment's parameters got their gradients behind it, and some were summed before the next one ran."""
    assert backwards.count("segment") == segments > 3
    ends = [k for k, event in enumerate(backwards) if event == "segment"]
    for end, following in zip(ends, [*ends[1:], len(backwards)], strict=True):
        assert following > end + 1, "a segment whose parameters got their gradients later"
    assert "sum" in backwards[: ends[1]], "nothing was summed before the second segment ran"


@on_ranks
def test_hooks_fire_between_segments() -> None:
    """So the ranks sum the gradients of the last layers while those of the first ones are not there yet."""
    events: list[str] = []
    with small_segments(events):
        model, twin = residual_layers(), residual_layers()
        parallel = noted(model, events)
        for step in range(2):  # DDP orders its buckets by the first
            events.clear()
            assert_step_as_one_process(parallel, twin, step)
        segments = len(model.plan(own(whole_batch())).segments)
    assert_summed_in_between(events[: len(events) - segments], segments)  # without the twin's


RECIPES: dict[str, Recipe] = {
    "delayed": DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling(),
    "blocks": MXFP8BlockScaling(),
}


def layers_of_products() -> te_fuser.Sequential:
    """Lists in a list, wide enough for products of 8 bits."""
    torch.manual_seed(0)
    parts = [(ops.LayerNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)) for _ in range(4)]
    return te_fuser.Sequential(*(te_fuser.Residual(*part) for part in parts), ops.RMSNorm(32))


@pytest.mark.parametrize("recipe", RECIPES)
@on_ranks
def test_hooks_fire_between_segments_in_regions(recipe: str) -> None:
    """No segment ends between 8 bits and their product, but one may end where the layers do; values are the same."""
    events: list[str] = []
    found = []
    for small in (True, False):
        with small_segments(events) if small else nullcontext():
            model = layers_of_products()
            parallel = noted(model, events)
            for step in range(2):
                events.clear()
                model.zero_grad()
                x = torch.randn(8, 32, generator=torch.Generator().manual_seed(WORLD * step + dist.get_rank()))
                with te_fuser.autocast(recipe=RECIPES[recipe]):
                    y = parallel(x)
                y.square().sum().backward()
            with te_fuser.autocast(recipe=RECIPES[recipe]):
                segments = len(model.plan(x).segments)
        if small:
            assert_summed_in_between(events, segments)
        else:
            assert segments == 1
        found.append([y, *gradients(parallel).values()])
    for cut, whole in zip(*found, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-5, atol=1e-6)

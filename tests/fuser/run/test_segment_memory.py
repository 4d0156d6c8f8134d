"""What a call holds: backward frees as it goes, and the plan says what is kept."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import te_fuser
from te_fuser import ops
from tests.twins import sequential, tensor


def allocations(run):
    """The sizes of what is allocated (+) and freed (-) while `run` runs, in order.

    `run` must not free what was there before: the profiler counts that or not, as it happens to know the address.
    """
    gc.collect()
    with torch.autograd.profiler.profile(use_device=None, profile_memory=True) as profile:
        run()
    events = [e for e in profile.kineto_results.events() if e.name() == "[memory]"]
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]


def peak(run):
    level = highest = 0
    for size in allocations(run):
        level += size
        highest = max(highest, level)
    return highest


def deep(kinds, size, depth):
    return [kind for _ in range(depth) for kind in (kinds["norm"](size), kinds["linear"](size, size), kinds["act"]())]


@pytest.mark.parametrize("frozen", [False, True])
def test_backward_frees_as_it_goes_like_eager(frozen):
    """One segment of many layers: its peak grows with depth as eager's does.

    What an interpreted kernel holds of one op comes on top of that, and is the same for every depth.
    """
    size = 64
    x = tensor(size, size, dtype=torch.float32)

    def activations(model):
        def step():
            model(x).square().mean().backward()

        step()  # plans are made
        x.grad = None
        model.zero_grad()
        return peak(step) / (x.numel() * x.itemsize)

    def growth(kinds, make):
        shallow, large = (activations(make(*deep(kinds, size, depth)).requires_grad_(not frozen)) for depth in (2, 7))
        return large - shallow

    def ours(*parts):
        model = te_fuser.Sequential(*parts, kernels="reference")
        assert len(model.plan(x).segments) == 1
        return model

    eager = growth({"norm": nn.LayerNorm, "linear": nn.Linear, "act": lambda: nn.GELU("tanh")}, nn.Sequential)
    assert growth({"norm": ops.LayerNorm, "linear": ops.Linear, "act": ops.GELU}, ours) <= eager + 0.1


def test_the_price_of_a_call_is_what_the_plan_says():
    """After forward, what is held is what the plan lists as kept, and the result."""
    model = sequential(ops.LayerNorm(64), ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64), ops.GELU())
    x = tensor(64, 64)
    model(x)
    held = []
    level = sum(allocations(lambda: held.append(model(x))))
    plan = model.plan(x)
    expected = sum(k.bytes for k in plan.kept if k.owner in ("activation", "statistic")) + 8 * 64 * 64
    assert level == pytest.approx(expected, rel=0.02)

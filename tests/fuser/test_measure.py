"""Clocks at the steps of a running plan: every step has a time, and nothing else changes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.fuser import Fuser
from te_fuser.fuser.measure import measured_run


class Slow(ops.UnfusedOperation):
    """y = x, forward in 20 ms and backward in 10 ms."""

    reads = ()

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return x.clone()

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        time.sleep(0.01)
        return dy


def fuser(*parts: ops.FusableOperation) -> Fuser:
    return Fuser(parts, kernels="reference")


def test_a_slow_step_is_found() -> None:
    model = fuser(ops.GELU(), Slow(), ops.ReLU())
    plan, times, _ = measured_run(model, torch.randn(3, 4, requires_grad=True), {}, repeats=3)
    for steps, found, least in ((plan.forward, times.forward, 0.02), (plan.backward, times.backward, 0.01)):
        assert len(found) == len(steps)
        slow = next(k for k, s in enumerate(steps) if s.start == 1)
        assert found[slow] >= least
        assert max(found) == found[slow]


def test_it_returns_what_the_call_returns() -> None:
    model, x = fuser(ops.GELU(), ops.Linear(4, 3), ops.Output("y")), torch.randn(5, 4)
    _, _, (result, named) = measured_run(model, x, {}, ("y",))
    assert torch.equal(result, model(x)) and torch.equal(named, result)


def test_named_inputs_take_part() -> None:
    model, x = fuser(ops.GELU(), ops.Add("skip")), torch.randn(5, 4)
    skip = torch.randn(5, 4, requires_grad=True)
    plan, times, result = measured_run(model, x, {"skip": skip})
    assert len(times.backward) == len(plan.backward) > 0 and skip.grad is None
    assert torch.equal(result, model(x, skip=skip))


def test_without_gradients_only_forward_is_measured() -> None:
    with torch.no_grad():
        _, times, _ = measured_run(fuser(ops.GELU(), ops.Linear(4, 4)), torch.randn(2, 4, requires_grad=True), {})
    assert times.forward and times.backward == ()


def test_the_model_itself_runs_without_clocks() -> None:
    model, x = fuser(ops.GELU(), ops.Linear(4, 4)), torch.randn(2, 4)
    before = model.prepare(x, {})
    measured_run(model, x, {})
    assert model.prepare(x, {}) is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = te_fuser.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)).cuda()
    explanation = model.explain(torch.randn(128, 64, device="cuda"), measure=True)
    assert all(t > 0 for t in (*explanation.measured[0].forward, *explanation.measured[0].backward))

"""Clocks at the steps of a running plan: every step has a time, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.show import measure
from te_fuser.fuser.show.measure import measured_run


class MadeUpTime:
    """A clock that goes on by 1 ms whenever it is read, and by what is slept; a busy machine changes nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def perf_counter(self) -> float:
        self.sleep(0.001)
        return self.seconds


class Slow(ops.UnfusedOperation):
    """y = x, forward in 20 ms and backward in 10 ms."""

    reads = ()

    def __init__(self, clock: MadeUpTime) -> None:
        super().__init__()
        self.clock = clock

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.02)
        return x.clone()

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.01)
        return dy


def fuser(*parts: ops.FusableOperation) -> Fuser:
    return Fuser(parts, kernels="reference")


def test_a_slow_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MadeUpTime()
    monkeypatch.setattr(measure, "time", clock)
    model = fuser(ops.GELU(), Slow(clock), ops.ReLU())
    plan, times, _ = measured_run(model, torch.randn(3, 4, requires_grad=True), {}, repeats=3)
    for steps, found, slept in ((plan.forward, times.forward, 0.02), (plan.backward, times.backward, 0.01)):
        assert found == pytest.approx([slept + 0.001 if s.start == 1 else 0.001 for s in steps])


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
    before = model.prepare(x, {})[0]
    measured_run(model, x, {})
    assert model.prepare(x, {})[0] is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = te_fuser.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)).cuda()
    explanation = model.explain(torch.randn(128, 64, device="cuda"), measure=True, details=True)
    assert all(t > 0 for t in (*explanation.measured[0].forward, *explanation.measured[0].backward))

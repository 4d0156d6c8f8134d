"""The profiler sees steps by name, anomaly mode says which step gave a NaN, and global hooks run for every op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.profiler import ProfilerActivity, profile

from te_fuser import Residual, Sequential, ops
from te_fuser.formula import sqrt


class Root(ops.RowOp):
    """y = sqrt(x)."""

    def compute(self, x: Any) -> Any:
        return sqrt(x)


def made() -> Sequential:
    return Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 4))


def test_the_profiler_sees_steps_and_their_ops() -> None:
    model, x = made(), torch.randn(3, 8)
    want = model(x)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, want)
    names = [e.key for e in seen.key_averages()]
    plan = model.plan(x)
    for step in (*plan.forward, *plan.backward):
        covered = [plan.graph.nodes[k].label for k in range(step.start, step.stop)]
        assert f"{step.name}: {', '.join(covered)}" in names, step.name


def test_anomaly_mode_names_the_step_and_its_ops() -> None:
    model = Sequential(ops.Linear(8, 8), Root(), ops.Scale(8))
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
    x = torch.randn(3, 8, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True), pytest.warns(UserWarning, match="Error detected in SegmentFunction"):
        y = model(x)
        with pytest.raises(RuntimeError, match=r"step '.*root.*Root.*' of te_fuser's backward gave NaN in d_x"):
            y.backward(torch.zeros_like(y))
    model(x).backward(torch.zeros(3, 8))
    assert x.grad.isnan().all()


def test_anomaly_mode_is_quiet_where_nothing_is_wrong() -> None:
    model, x = made(), torch.randn(3, 8)
    with torch.autograd.set_detect_anomaly(True, check_nan=True):
        model(x).sum().backward()


def test_global_hooks_run_for_every_op() -> None:
    model = Sequential(ops.LayerNorm(8), Residual(ops.Linear(8, 8), ops.GELU()), ops.Dropout(0.0))
    x = torch.randn(3, 8)
    want, planned = model(x), model.plan(x)
    forward: list[str] = []
    backward: list[str] = []
    handles = [
        register_module_forward_hook(lambda m, *_: forward.append(type(m).__name__)),
        register_module_full_backward_hook(lambda m, *_: backward.append(type(m).__name__)),
    ]
    try:
        y = model(x.clone().requires_grad_())
        y.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    torch.testing.assert_close(y, want)
    assert forward == ["LayerNorm", "Linear", "GELU", "Residual", "Dropout", "Sequential"]
    assert sorted(backward) == sorted(forward)
    assert torch.equal(model(x), want) and len(model.plan(x).forward) == len(planned.forward)


def test_a_global_hook_may_change_what_an_op_gives() -> None:
    model, x = Sequential(ops.Scale(value=2.0), ops.Scale(value=3.0)), torch.randn(3, 8)
    handle = register_module_forward_hook(lambda m, _, y: y + 1.0 if isinstance(m, ops.Scale) else None)
    try:
        torch.testing.assert_close(model(x), (2.0 * x + 1.0) * 3.0 + 1.0)
    finally:
        handle.remove()
    torch.testing.assert_close(model(x), 6.0 * x)

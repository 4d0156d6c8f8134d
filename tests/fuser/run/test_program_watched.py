"""The profiler sees steps by name, anomaly mode says where a NaN came from, hooks run, and ops that lie are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_full_backward_hook
from torch.profiler import ProfilerActivity, profile

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.formula import sqrt
from tests.twins import tensor


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


# ------------------------------------------------------------------- ops that give what they do not declare


X = tensor(5, 8)


class Lying(ops.UnfusedOperation):
    """Says that it keeps the shape and the dtype, and does not: in one direction, from a call on."""

    reads = ()

    def __init__(self, forward, dtype=None, honest=0):
        super().__init__()
        self.is_forward, self.dtype, self.honest = forward, dtype, [honest]

    def lie(self, x):
        if self.honest[0]:
            self.honest[0] -= 1
            return x.clone()
        return x[:, :4] if self.dtype is None else x.to(self.dtype)

    def op_forward(self, call, x):
        return self.lie(x) if self.is_forward else x.clone()

    def op_backward(self, call, dy):
        return dy if self.is_forward else self.lie(dy)


def called(model, x):
    return lambda: model(x.detach().float().requires_grad_()).sum().backward()


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("last", [True, False])
def test_an_op_that_gives_another_shape_than_it_declares(forward, last, kernels):
    """In a plan's first call its name is known, also where nothing of ours reads what it gives."""
    lying = Lying(forward)
    model = te_fuser.Sequential(*((ops.GELU(), lying) if last else (lying, ops.GELU())), kernels=kernels)
    made = "lying.output" if forward else "gradient of .*"
    words = (
        rf"^op {int(last)} \(Lying '{int(last)}'\): {made} is float32 \[5, 4\] cpu, the plan says float32 \[5, 8\] cpu"
    )
    with pytest.raises(ValueError, match=words):
        called(model, X)()
    assert_other_steps_are_not_looked_at(model)


def assert_other_steps_are_not_looked_at(model):
    """Later calls are not watched: an honest op runs by the plan that the lie was found in."""
    lying = next(op for op in model if isinstance(op, Lying))
    lying.honest[0] = 2
    called(model, X)()
    assert len(model.plans_kept()) == 1


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_gives_another_dtype_than_it_declares(forward):
    model = te_fuser.Sequential(Lying(forward, torch.float64), ops.GELU())
    words = r"^op 0 \(Lying '0'\): .* is float64 \[5, 8\] cpu, the plan says float32 \[5, 8\] cpu; that is what infer"
    with pytest.raises(TypeError, match=words):
        called(model, X)()


@pytest.mark.parametrize("forward", [True, False])
def test_an_op_that_lies_in_later_calls(forward):
    """Generated kernels go by the shapes that ops declare: they would read and write beyond the tensor."""
    model = te_fuser.Sequential(ops.GELU(), Lying(forward, honest=1), ops.GELU())
    called(model, X)()
    with pytest.raises(ValueError, match=r"has 20 elements, planned were 40 \(5 x 8\).*another shape than it declares"):
        called(model, X)()

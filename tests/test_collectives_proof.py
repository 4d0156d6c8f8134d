"""Ops of a user's that start in one step what another waits for; several processes: tests/parallel."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.overlap import waiting_late
from te_fuser.ops.base import Gradient, OpCall
from te_fuser.ops.operations import UnfusedOperation

WIDTH = 16
Way = tuple[Any, torch.Tensor]


def gather(call: OpCall, x: torch.Tensor) -> Way:
    """Transfer under way, and the tensor for the rows of all processes."""
    whole = torch.empty_like(x)
    return dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True), whole


def arrived(call: OpCall, way: Way) -> torch.Tensor:
    work, whole = way
    work.wait()
    return whole


class Later(UnfusedOperation):
    """y = the rows of all processes; its gradient is gathered too, and started before that of the weights behind it."""

    reads = ()

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return gather(call, x)

    def op_wait(self, call: OpCall, way: Way) -> torch.Tensor:
        return arrived(call, way)

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "start", wait="wait"),)

    def start(self, call: OpCall, dy: torch.Tensor) -> Way:
        return gather(call, dy)

    def wait(self, call: OpCall, way: Way) -> dict[str, torch.Tensor | None]:
        return {"input": arrived(call, way)}


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_what_is_under_way_is_waited_for_late(alone: None) -> None:
    """Steps that do not need it run in between, and nothing that it reads or writes is dropped or stored over."""
    model = te_fuser.Sequential(ops.GELU(), Later(), ops.MatMul(WIDTH, WIDTH), kernels="reference").double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    plan = model.plan(x)
    started, waiting = (next(s for s in plan.forward if s.name == f"later.{phase}") for phase in ("start", "wait"))
    assert set(started.reads()) < set(waiting.reads()) and not started.task.own_memory and not waiting.task.own_memory
    y = model(x)
    dx, dw = torch.autograd.grad(y.square().sum(), [x, model[2].weight])
    leaf = x.detach().requires_grad_()
    want = torch.nn.functional.gelu(leaf, approximate="tanh") @ model[2].weight.mT
    for a, b in zip((dx, dw), torch.autograd.grad(want.square().sum(), [leaf, model[2].weight]), strict=True):
        torch.testing.assert_close(a, b)


def test_a_step_that_waits_stands_before_its_first_reader() -> None:
    model = te_fuser.Sequential(Later(), ops.MatMul(WIDTH, WIDTH), ops.GELU(), kernels="reference")
    start, wait, product, gelu = model.plan(torch.randn(4, WIDTH)).forward
    assert waiting_late([start, wait, product, gelu]) == [start, wait, product, gelu]
    between = replace(gelu, inputs=(), outputs=())
    assert waiting_late([start, wait, between, between, product]) == [start, between, between, wait, product]
    assert waiting_late([start, wait, between]) == [start, between, wait]


class Doubled(UnfusedOperation):
    """y = 2 x, and what backward reads is given in either phase."""

    reads = emits = ("early", "late")

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        call.emit("early", x + 1)
        return 2 * x

    def op_wait(self, call: OpCall, started: torch.Tensor) -> torch.Tensor:
        call.emit("late", started + 2)
        return started

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        assert torch.equal(2 * call["early"], call["late"])
        return 2 * dy


def test_what_is_emitted_when_it_starts_is_there_when_it_ends() -> None:
    model = te_fuser.Sequential(ops.GELU(), Doubled(), kernels="reference", verify=True).double()
    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    (dx,) = torch.autograd.grad(model(x).sum(), x)
    torch.testing.assert_close(dx, torch.autograd.grad(model.reference(x).sum(), x)[0])


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("forward must return a tensor, got NoneType", {"op_wait": lambda self, call, way: None}),
        ("backward must return a dict of gradients by name, got int", {"wait": lambda self, call, way: 1}),
        ("backward gave no gradient for .input.", {"wait": lambda self, call, way: {}}),
    ],
)
def test_a_phase_that_gives_nothing(words: str, changed: dict[str, Any]) -> None:
    own = {
        "gradients": lambda self, names: (Gradient(("input",), (), "start", wait="wait"),),
        "op_forward": lambda self, call, x: x,
        "op_wait": lambda self, call, way: way,
        "start": lambda self, call, dy: dy,
        "wait": lambda self, call, way: {"input": way},
    }
    model = te_fuser.Sequential(ops.GELU(), type("Bad", (UnfusedOperation,), own | changed)(), kernels="reference")
    with pytest.raises((TypeError, RuntimeError), match=rf"op 1 \(Bad '1'\): its {words}"):
        model(torch.randn(4, WIDTH, requires_grad=True)).sum().backward()

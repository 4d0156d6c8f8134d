"""Ops of a user's that gather and scatter rows over two processes, and start in one step what another waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.overlap import waiting_late
from te_fuser.ops.base import Gradient, OpCall, Spec
from te_fuser.ops.operations import UnfusedOperation

WORLD, ROWS, WIDTH = 2, 5, 16
Way = tuple[Any, torch.Tensor]


def gather(call: OpCall, x: torch.Tensor) -> Way:
    """What is under way: the transfer, and where the rows of all processes will be."""
    whole = x.new_empty(WORLD * x.shape[0], *x.shape[1:])
    return dist.all_gather_into_tensor(whole, x.contiguous(), async_op=True), whole


def arrived(call: OpCall, way: Way) -> torch.Tensor:
    work, whole = way
    work.wait()
    return whole


def own(x: torch.Tensor) -> torch.Tensor:
    """The rows of this process."""
    return x.chunk(WORLD)[dist.get_rank()].contiguous()


class GatherRows(UnfusedOperation):
    """y = the rows of all processes; what follows is the same on each, and so is its gradient."""

    reads = ()

    def infer(self, x: Spec) -> Spec:
        return replace(x, shape=(WORLD * x.shape[0], *x.shape[1:]))

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return gather(call, x)

    def op_wait(self, call: OpCall, way: Way) -> torch.Tensor:
        return arrived(call, way)

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return own(dy)


class ScatterRows(UnfusedOperation):
    """y = this process's rows of what all have; backward gathers."""

    def infer(self, x: Spec) -> Spec:
        return replace(x, shape=(x.shape[0] // WORLD, *x.shape[1:]))

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "start", wait="wait"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return own(x)

    def start(self, call: OpCall, dy: torch.Tensor) -> Way:
        return gather(call, dy)

    def wait(self, call: OpCall, way: Way) -> dict[str, torch.Tensor | None]:
        return {"input": arrived(call, way)}


def parts() -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Output("end"), ops.Linear(WIDTH, WIDTH)]


def whole_input() -> torch.Tensor:
    return torch.randn(WORLD * ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def gradient_of_output() -> torch.Tensor:
    return torch.randn(WORLD * ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def spread() -> te_fuser.Sequential:
    norm, first, gelu, _, second = parts()
    return te_fuser.Sequential(norm, GatherRows(), first, gelu, second, ScatterRows(), ops.GELU())


def one_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    try:
        model = spread().double()
        x = own(whole_input()).requires_grad_()
        plan = model.plan(x)
        names = [s.name for s in plan.forward]
        at = names.index("gather_rows.start")
        assert names[at + 1] == "gather_rows.wait" and "scatter_rows.start" not in names
        back = [s.name for s in plan.backward]
        assert back.index("scatter_rows.input_gradient.start") < back.index("scatter_rows.input_gradient.wait")
        y = model(x)
        y.backward(own(gradient_of_output()))
        gradients = {name: p.grad for name, p in model.named_parameters()}
        torch.save({"y": y.detach(), "x": x.grad, **gradients}, f"{folder}/{rank}")
        model.verify = True
        torch.testing.assert_close(model(x), y, rtol=0, atol=0)
    finally:
        dist.destroy_process_group()


def test_rows_over_two_processes(tmp_path: Path) -> None:
    """Values and gradients as in one process."""
    mp.spawn(one_of_two, (str(tmp_path),), nprocs=WORLD)
    norm, first, gelu, _, second = parts()
    whole = te_fuser.Sequential(norm, first, gelu, second, ops.GELU()).double()
    x = whole_input().requires_grad_()
    y = whole(x)
    y.backward(gradient_of_output())
    found = [torch.load(tmp_path / str(rank), weights_only=True) for rank in range(WORLD)]
    torch.testing.assert_close(torch.cat([f["y"] for f in found]), y.detach())
    torch.testing.assert_close(torch.cat([f["x"] for f in found]), x.grad)
    # What stands before the gathering sees its own rows alone, what stands behind it all of them.
    for name, other in (("0.weight", norm.weight), ("0.bias", norm.bias)):
        torch.testing.assert_close(sum(f[name] for f in found), other.grad)
    for name, other in (("2.weight", first.weight), ("2.bias", first.bias), ("4.weight", second.weight)):
        for f in found:
            torch.testing.assert_close(f[name], other.grad)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(f"{__name__}.WORLD", 1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Later(GatherRows):
    """Its gradient is gathered too, and started before that of the weights behind it."""

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), (), "start", wait="wait"),)

    start, wait = ScatterRows.start, ScatterRows.wait


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

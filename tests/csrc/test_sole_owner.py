"""Memory that the native runtime stores over: held by a slot alone, and laid out as the output is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.codegen import in_place
from te_fuser.fuser.graph.refs import gradient_ref
from te_fuser.fuser.run import loading
from te_fuser.fuser.run.program import Loaded, Program, build_program
from te_fuser.fuser.steps.kernel_task import KernelTask
from tests.fake_cuda import Emulation, FakeDriver
from tests.fuser.plan.test_overwriting import HOLDERS, ROWS, WIDTH
from tests.needs import needs_compiler

pytestmark = needs_compiler


@pytest.fixture
def program(driver: FakeDriver, emulation: Emulation) -> Iterator[Program]:
    """gelu' as a program of two inputs, the first of which it may overwrite."""
    with emulation.in_plans():
        yield gelu_backward()


def gelu_backward() -> Program:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    (step,) = Sequential(ops.GELU("tanh"), kernels="generated").plan(x).backward
    assert isinstance(step.task, KernelTask)
    d = step.task.description
    d = dataclasses.replace(d, overwrites=in_place.pairs(d, {d.loads[0].name}))
    changed = dataclasses.replace(step, task=dataclasses.replace(step.task, description=d))
    kernels = loading.load_kernels([d], "cuda", torch.device("cpu"))
    return build_program([changed], step.task.inputs, [gradient_ref(0)], Loaded(kernels))[0]


def overwritten(program: Program, tensors: list[torch.Tensor], *may_overwrite: bool) -> bool:
    """True if the output has the first input's memory."""
    address = tensors[0].data_ptr()
    slots = program.slots(tensors)
    tensors.clear()
    program.run(slots, *may_overwrite)
    return bool(slots[program.size - 1].data_ptr() == address)


def two(*shape: int) -> list[torch.Tensor]:
    return [torch.randn(shape or (ROWS, WIDTH)) for _ in range(2)]


def test_a_step_overwrites_what_it_alone_holds(program: Program) -> None:
    assert overwritten(program, two())
    assert overwritten(program, two(4, 8, WIDTH))
    assert not overwritten(program, two(), False)


@pytest.mark.parametrize("name", HOLDERS)
def test_a_step_overwrites_nothing_that_somebody_holds(name: str, program: Program) -> None:
    tensors = two()
    held = HOLDERS[name](tensors[0])
    assert not overwritten(program, tensors)
    del held
    assert overwritten(program, two())


def test_a_step_overwrites_no_memory_that_pytorch_did_not_allocate(program: Program) -> None:
    tensors = two()
    tensors[0] = torch.from_numpy(tensors[0].numpy().copy())
    assert not overwritten(program, tensors)


def test_a_step_overwrites_nothing_that_lies_otherwise(program: Program) -> None:
    strided, misaligned, flat = two(), two(), two()
    strided[0] = torch.randn(WIDTH, ROWS).t()
    misaligned[0] = torch.randn(ROWS * WIDTH + 1)[1:].view(ROWS, WIDTH)
    flat[0] = torch.randn(ROWS * WIDTH)
    flat[1] = torch.randn(ROWS, WIDTH)
    for tensors in (strided, misaligned):
        assert not overwritten(program, tensors)
    with contextlib.suppress(ValueError):  # as the lead it says that there is one row
        assert not overwritten(program, flat)

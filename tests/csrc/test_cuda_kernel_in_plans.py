"""Plans that run emulated CUDA kernels on machines without a GPU, and the memory that they store over."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.codegen import in_place
from te_fuser.fuser.graph.refs import gradient_ref
from te_fuser.fuser.run import loading
from te_fuser.fuser.run.program import Loaded, Program, build_program
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.verify.examples import Case
from te_fuser.verify.models import Subject, example_call
from tests.fake_cuda import Emulation, FakeDriver
from tests.formula.test_row_ops import row_op
from tests.fuser.plan.test_overwriting import HOLDERS, ROWS, WIDTH
from tests.needs import needs_compiler
from tests.twins import randomize, results_and_gradients, tensor

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


def block(width: int, dtype: torch.dtype, dropout: float = 0.0) -> te_fuser.Sequential:
    """A small MLP block with everything that a stretch may have."""
    model = te_fuser.Sequential(
        te_fuser.Residual(
            ops.LayerNorm(width), ops.Linear(width, 2 * width), ops.GELU("tanh"), ops.Linear(2 * width, width),
            ops.Dropout(dropout),
        ),
        ops.RMSNorm(width), ops.Linear(width, 2 * width), ops.SwiGLU(), ops.Scale(width),
    )  # fmt: skip
    return randomize(model).to(dtype)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
def test_plans_run_generated_kernels(
    dtype: torch.dtype, tolerance: float, driver: FakeDriver, emulation: Emulation
) -> None:
    model = block(24, dtype, dropout=0.25)
    exact = block(24, torch.float64, dropout=0.25)
    exact.load_state_dict({name: t.double() for name, t in model.state_dict().items()})
    x = tensor(3, 7, 24, dtype=dtype)
    leaves = {"x": x, **dict(model.named_parameters())}
    with emulation.in_plans():
        y, gradients = results_and_gradients(model, leaves, x)
        again, gradients_again = results_and_gradients(model, leaves, x)
    assert driver.launches > 4
    assert torch.equal(y[0], again[0])
    assert all(torch.equal(g, gradients_again[n]) for n, g in gradients.items())  # type: ignore[arg-type]
    x = x.detach().double().requires_grad_()
    want, wanted = results_and_gradients(exact.reference, {"x": x, **dict(exact.named_parameters())}, x)
    pairs = [(y[0], want[0]), *((g, wanted[n]) for n, g in gradients.items())]
    for got, right in pairs:
        assert got is not None and right is not None
        assert (got.double() - right).abs().max() <= tolerance * right.abs().max()


# Everything that ops have of their own: parameters, scalars, named inputs by row and by sample, draws, two halves.
IN_PLANS = (
    "bias", "scale_scalar", "scale_constant", "swiglu", "layer_norm", "adaptive_per_row", "adaptive_per_sample_0",
    "adaptive_per_sample_1", "dropout", "drop_path_0",
)  # fmt: skip


@pytest.mark.parametrize("name", IN_PLANS)
def test_ops_alone(name: str, driver: FakeDriver, emulation: Emulation) -> None:
    op = row_op(name, 24)
    subject = Subject(te_fuser.Sequential(op, kernels="generated"), torch.bfloat16, torch.device("cpu"))
    with emulation.in_plans():
        for leading, layout in (((5, 7), "contiguous"), ((0, 4), "contiguous"), ((3, 11), "misaligned")):
            case = Case(f"{leading} {layout}", torch.bfloat16, leading, layout)
            rng = torch.Generator().manual_seed(3)
            call = example_call(subject.fused, (*leading, 24), torch.bfloat16, torch.device("cpu"), rng)
            assert not [str(row) for row in subject.check(case, call) if not row.passed]
    assert driver.launches and driver.pushes == driver.pops


def test_plans_without_rows(driver: FakeDriver, emulation: Emulation) -> None:
    model = block(24, torch.float32)
    x = torch.zeros(0, 24, requires_grad=True)
    with emulation.in_plans():
        model(x).sum().backward()
    assert x.grad is not None and x.grad.shape == (0, 24)
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())

"""Column sums of several kernels, added up by one launch at the end of a program."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import _native, ops
from te_fuser.codegen.cuda_text import FINISH_THREADS
from te_fuser.fuser.run import loading
from te_fuser.verify import steps as verify_steps
from tests.fake_cuda import Emulation, FakeDriver
from tests.kernels.emulated import launched
from tests.needs import needs_compiler
from tests.twins import randomize, tensor

WIDTH = 40


# ---- in plans ---------------------------------------------------------------------------------------------------


def layers(dtype: torch.dtype) -> te_fuser.Sequential:
    model = te_fuser.Sequential(
        ops.LayerNorm(WIDTH), ops.Linear(WIDTH, 2 * WIDTH), ops.GELU(), ops.Linear(2 * WIDTH, WIDTH), ops.RMSNorm(WIDTH)
    )
    return randomize(model).to(dtype)


def gradients(model: te_fuser.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    y = model(x)
    return [*torch.autograd.grad(y, [x, *model.parameters()], torch.full_like(y, 0.5))]


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_launch_gives_what_each_kernel_would(
    dtype: torch.dtype, driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = tensor(90, WIDTH, dtype=dtype)
    with emulation.in_plans():
        together, launches, last = launched(driver, gradients, layers(dtype), x)
        monkeypatch.setattr(loading, "load_column_sums", lambda target, device: None)
        apart, more, other = launched(driver, gradients, layers(dtype), x)
    assert last == b"column_sums" and other.endswith(b"_finish")
    assert more == launches + 2  # three kernels have sums
    assert all(torch.equal(a, b) for a, b in zip(together, apart, strict=True))


@needs_compiler
def test_sums_that_a_step_reads_do_not_wait(driver: FakeDriver, emulation: Emulation) -> None:
    """A shared parameter's gradient is the sum of two: both are read within the program."""
    shared = ops.Scale(WIDTH)
    model = randomize(te_fuser.Sequential(shared, ops.Linear(WIDTH, WIDTH), shared, ops.Linear(WIDTH, WIDTH)))
    exact = te_fuser.Sequential(*model).double()
    x = tensor(90, WIDTH, dtype=torch.float32)
    with emulation.in_plans():
        found, _, _ = launched(driver, gradients, model.float(), x)
    leaf = x.detach().double().requires_grad_()
    y = exact.double().reference(leaf)
    wanted = torch.autograd.grad(y, [leaf, *exact.parameters()], torch.full_like(y, 0.5))
    for got, want in zip(found, wanted, strict=True):
        assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max()


@needs_compiler
def test_sums_of_verified_steps_come_by_the_same_kernel(
    driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a step by itself: what looks at its results after it has run finds them there."""
    checked = te_fuser.Sequential(*layers(torch.float32), verify=True)
    x = tensor(90, WIDTH, dtype=torch.float32)
    with emulation.in_plans():
        found, launches, last = launched(driver, gradients, checked, x)
        together, fewer, _ = launched(driver, gradients, layers(torch.float32), x)
    assert last == b"column_sums" and launches == fewer + 2  # three kernels have sums
    assert all(torch.equal(a, b) for a, b in zip(found, together, strict=True))


@needs_compiler
def test_verified_steps_add_up_by_themselves_what_a_step_reads(
    driver: FakeDriver, emulation: Emulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = ops.Scale(WIDTH)
    parts = (shared, ops.MatMul(WIDTH, WIDTH), shared, ops.MatMul(WIDTH, WIDTH))
    model = randomize(te_fuser.Sequential(*parts, verify=True)).float()
    names: list[bytes] = []
    run = verify_steps._CheckedRunner._run

    def watched(self: Any, slots: Any) -> Any:
        made = run(self, slots)
        names.append(driver.last_symbol)
        return made

    monkeypatch.setattr(verify_steps._CheckedRunner, "_run", watched)
    with emulation.in_plans():
        gradients(model, tensor(90, WIDTH, dtype=torch.float32))
    assert b"column_sums" not in names and any(name.endswith(b"_finish") for name in names)


# ---- in programs ------------------------------------------------------------------------------------------------

ROWS, FINISH = (1, 1, 2, False, True), (1, 0)


def nothing(width: int, sums: int) -> _native.CudaKernel:
    """A kernel with sums of that width, which writes nothing."""
    partials = tuple(("partial", k) for k in range(sums))
    totals = tuple(("tensor", 1 + k) for k in range(sums))
    launches = (
        ("rows", 128, 0, ROWS, (("tensor", 0), *partials, ("rows", 0))),
        ("finish", FINISH_THREADS, 0, FINISH, (*partials, *totals, ("groups", 0), ("batch_size", 0))),
    )
    dtypes = ("float32",) * (1 + sums)
    return _native.CudaKernel(
        "nothing", b"nowhere:-", dtypes, (4,) * (1 + sums), 1, launches, (width,) * sums, 0, 0, waits=True
    )


def program(steps: int, width: int, sums: int, may_wait: bool = True) -> tuple[_native.Program, list[Any]]:
    """Steps that all read slot 0, each with sums of its own; and the slots."""
    runners = [
        _native.KernelStep(
            "nothing", nothing(width, sums), [0], 0, None,
            [(1 + k * sums + i, -1, 1, 0, (width,), torch.float32) for i in range(sums)],
            (), [], 1 << 60, None,
        )
        for k in range(steps)
    ]  # fmt: skip
    kernel = _native.ColumnSums(b"nowhere:-")
    made = _native.Program([(r, []) for r in runners], kernel, range(steps) if may_wait else ())
    return made, [torch.zeros(64, 4), *[None] * (steps * sums)]


@pytest.mark.parametrize(
    ("steps", "width", "sums", "rows", "launches", "last"),
    [
        *((n, WIDTH, sums, 64, n + more, b"column_sums") for n, sums, more in ((1, 1, 1), (3, 2, 1), (16, 4, 1))),
        (17, WIDTH, 4, 64, 17 + 2, b"column_sums"),  # a launch takes 64 sums
        (3, 2 << 20, 1, 64, 3 + 2, b"column_sums"),  # and those that fill 64 MiB; here each step has 48
        (2, WIDTH, 1, 1, 2, b"rows"),  # one block has nothing to add up
    ],
)
def test_sums_of_a_program_are_added_up_by_few_launches(
    driver: FakeDriver, steps: int, width: int, sums: int, rows: int, launches: int, last: bytes
) -> None:
    made, slots = program(steps, width, sums)
    slots[0] = torch.zeros(rows, 4)
    made.run(slots)
    assert (driver.launches, driver.last_symbol) == (launches, last)
    if last == b"column_sums":
        assert driver.early == driver.launches and driver.last_threads == FINISH_THREADS
    if width == WIDTH and rows > 1:
        assert driver.last_blocks == 2 * (steps * sums - 64 * (launches - steps - 1))


def test_sums_of_a_program_without_leave_are_added_up_by_each_step(driver: FakeDriver) -> None:
    made, slots = program(3, WIDTH, 2, may_wait=False)
    made.run(slots)
    assert (driver.launches, driver.last_symbol) == (6, b"finish")


def test_what_the_driver_refuses_is_said(driver: FakeDriver) -> None:
    made, slots = program(1, WIDTH, 1)
    made.run(slots)
    driver.failing = 700
    with pytest.raises(RuntimeError, match="cuda:0 refused 'rows'.*illegal memory access"):
        made.run(slots)
    with pytest.raises(RuntimeError, match="'column_sums': there is no cuda:7"):
        _native.ColumnSums(b"nowhere:-").load(7)


# ---- in programs, by steps in Python ----------------------------------------------------------------------------


def python_steps(*steps: Any) -> tuple[_native.Program, list[Any]]:
    """A program of steps all of whose sums may wait; slot 0 is what they read, slot 1 has their totals."""
    made = _native.Program([(s, []) for s in steps], _native.ColumnSums(b"nowhere:-"), range(len(steps)))
    return made, [torch.zeros(64, 4), torch.zeros(WIDTH)]


def test_a_step_in_python_leaves_its_sums(driver: FakeDriver) -> None:
    kernel, seen = nothing(WIDTH, 1), []

    def step(slots: list[Any], later: object) -> None:
        kernel.leave_sums(later, tuple(slots), 64, 1, 1, ())
        seen.append((driver.launches, driver.last_symbol))

    made, slots = python_steps(step, step)
    made.run(slots)
    assert seen == [(1, b"rows"), (2, b"rows")]
    assert (driver.launches, driver.last_symbol, driver.last_blocks) == (3, b"column_sums", 4)


def test_totals_live_wherever_a_kernel_takes_them(driver: FakeDriver) -> None:
    """A step may drop them: what is yet to be written is not given back before."""
    rows = ("rows", 32, 0, (1, 1, 2, False, True), (("tensor", 0), ("tensor", 2), ("partial", 0)))
    finish = ("finish", FINISH_THREADS, 0, (1, 0), (("partial", 0), ("tensor", 1), ("groups", 0)))
    dtypes = ("float32",) * 3
    kernel = _native.CudaKernel("nothing", b"nowhere:-", dtypes, (4,) * 3, 1, (rows, finish), (WIDTH,), 0, 0)
    died: list[bytes] = []

    def step(slots: list[Any], later: object) -> None:
        total = torch.zeros(WIDTH)
        kernel.leave_sums(later, (slots[0], total, torch.zeros(64, 4)), 64, 1, 1, ())
        weakref.finalize(total, lambda: died.append(driver.last_symbol))

    made, slots = python_steps(step)
    made.run(slots)
    assert died == [b"column_sums"]


def test_only_who_is_told_leaves_sums(driver: FakeDriver) -> None:
    """Another call in such a step, or a program in it, adds up before it returns."""
    kernel, seen = nothing(WIDTH, 1), []
    inner, inner_slots = program(1, WIDTH, 1)

    def step(slots: list[Any], later: object) -> None:
        kernel(tuple(slots), 64, 1, 1, ())
        seen.append((driver.launches, driver.last_symbol))
        kernel.leave_sums(later, tuple(slots), 64, 1, 1, ())
        inner.run(inner_slots)
        seen.append((driver.launches, driver.last_symbol, driver.last_blocks))

    made, slots = python_steps(step)
    made.run(slots)
    assert seen == [(2, b"finish"), (5, b"column_sums", 2)]
    assert (driver.launches, driver.last_symbol, driver.last_blocks) == (6, b"column_sums", 2)


def test_a_step_whose_sums_may_not_wait_is_given_nothing(driver: FakeDriver) -> None:
    given: list[tuple[Any, ...]] = []
    made = _native.Program([(lambda *a: given.append(a), [])], _native.ColumnSums(b"nowhere:-"), ())
    made.run([])
    made = _native.Program([(lambda *a: given.append(a), [])], None, (0,))
    made.run([])
    assert given == [([],), ([],)]


def test_what_was_lent_is_good_for_its_step_alone(driver: FakeDriver) -> None:
    kernel, kept = nothing(WIDTH, 1), []

    def second(slots: list[Any], later: object) -> None:
        kernel.leave_sums(kept[0], tuple(slots), 64, 1, 1, ())

    made, slots = python_steps(lambda slots, later: kept.append(later), second)
    with pytest.raises(RuntimeError, match="kernel 'nothing': the step to which a program lent its sums is over"):
        made.run(slots)
    with pytest.raises(RuntimeError, match="is over"):
        kernel.leave_sums(kept[0], tuple(slots), 64, 1, 1, ())
    for wrong in (None, slots, driver):
        with pytest.raises(TypeError, match=f"what a program lends to a step, got {type(wrong).__name__}"):
            kernel.leave_sums(wrong, tuple(slots), 64, 1, 1, ())
    with pytest.raises(TypeError, match="got NoneType"):
        kernel.leave_sums()  # type: ignore[call-arg]
    assert driver.launches == 0


def test_an_exception_drops_what_waited(driver: FakeDriver) -> None:
    kernel = nothing(WIDTH, 1)
    fails = True

    def step(slots: list[Any], later: object) -> None:
        kernel.leave_sums(later, tuple(slots), 64, 1, 1, ())
        if fails:
            raise KeyError("enough")

    made, slots = python_steps(step)
    with pytest.raises(KeyError, match="enough"):
        made.run(slots)
    assert (driver.launches, driver.last_symbol) == (1, b"rows")
    fails = False
    made.run(slots)
    assert (driver.launches, driver.last_symbol, driver.last_blocks) == (3, b"column_sums", 2)

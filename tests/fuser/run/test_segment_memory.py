"""Memory of a call, also when it runs out in the middle: nothing stays behind, the next call is right."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import te_fuser
from te_fuser import Residual, Sequential, ops
from tests.fake_cuda import CXX, Emulation, compile_driver, in_place
from tests.twins import randomize, sequential, tensor

_ALLOCATES = re.compile(r"aten\.(empty|mm|clone|addmm)")


class Memory(TorchDispatchMode):
    """Counts allocations, and lets one of them fail."""

    def __init__(self, failing: int = 0) -> None:
        super().__init__()
        self.failing, self.count = failing, 0

    def __torch_dispatch__(
        self, function: Any, types: Sequence[Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.count += bool(_ALLOCATES.match(str(function)))
        if self.count == self.failing:
            self.failing = 0
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")
        return function(*args, **(kwargs or {}))


@pytest.fixture(params=["generated", "reference", "emulated"])
def kernels(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Ways to run the model: generated C++, PyTorch's operations, CUDA kernels on the CPU."""
    with contextlib.ExitStack() as stack:
        if request.param != "reference" and CXX is None:
            pytest.skip("needs a C++ compiler")
        if request.param == "emulated":
            stack.enter_context(in_place(compile_driver()))
            stack.enter_context(Emulation(tmp_path).in_plans())
        yield "reference" if request.param == "reference" else "generated"


def tensors() -> int:
    gc.collect()
    return sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects())


def test_a_call_that_runs_out_of_memory_leaves_the_model_usable(kernels: str) -> None:
    branch = Residual(ops.LayerNorm(8), ops.Linear(8, 12), ops.GELU(), ops.Linear(12, 8), ops.Dropout(0.25))
    model = randomize(Sequential(branch, ops.RMSNorm(8), kernels=kernels)).float()
    x = torch.randn(300, 8, requires_grad=True)  # rows enough for partial sums
    leaves = [x, *model.parameters()]

    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y.sum(), leaves)]

    right, memory = run(), Memory()
    plan, before = model.plan(x), tensors()
    with memory:
        run()
    assert memory.count > 15
    for failing in range(1, memory.count + 1):
        # A mode's own error comes through the native runtime's allocator as a MemoryError.
        with pytest.raises((torch.OutOfMemoryError, MemoryError)), Memory(failing):
            run()
    assert tensors() == before
    assert all(torch.equal(a, b) for a, b in zip(run(), right, strict=True))
    assert [s.name for s in model.plan(x).backward] == [s.name for s in plan.backward]


# -------------------------------------------------------------------------------- what a call holds


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

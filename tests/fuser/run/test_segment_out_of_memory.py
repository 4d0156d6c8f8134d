"""Memory that runs out in the middle of a call: nothing stays behind, and the next call is right."""

from __future__ import annotations

import contextlib
import gc
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from te_fuser import Residual, Sequential, ops
from tests.fake_cuda import CXX, Emulation, compile_driver, in_place
from tests.twins import randomize

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
    """How the model runs: generated C++, PyTorch's operations, CUDA kernels on the CPU."""
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

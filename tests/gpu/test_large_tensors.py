"""Generated CUDA kernels on tensors of more than 2^31 elements, against the same model on some of their rows alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.formula.random import keep_bits, threshold
from te_fuser.fuser.run.loading import draw_seed
from te_fuser.fuser.steps.kernel_task import KernelTask
from tests.twins import randomize

GPU = torch.device("cuda")
BEYOND = 2**31  # elements, and with two bytes for each 2^32 bytes
ROWS_BEYOND = 40
AROUND = 2 * ROWS_BEYOND  # rows that are looked at, at the start and at the end: half of the latter lie beyond
SPARE = 2**30  # bytes beside the large tensors: statistics of each row, partial sums, what PyTorch takes


@pytest.fixture(autouse=True)
def _memory_back() -> Iterator[None]:
    """Free a test's memory for the next one, and for other processes."""
    yield
    torch.cuda.empty_cache()


def need(tensors: int) -> None:
    """Skip the test where the GPU has no room for so many of the large tensors."""
    torch.cuda.empty_cache()
    wanted, free = tensors * 2 * BEYOND + SPARE, torch.cuda.mem_get_info()[0]
    if free < wanted:
        pytest.skip(f"needs {wanted / 2**30:.0f} GiB of free memory on the GPU, which has {free / 2**30:.0f}")


def generated(x: torch.Tensor, *parts: ops.RowOp) -> Sequential:
    """A model that generated kernels alone run."""
    model = randomize(Sequential(*parts, kernels="generated")).to(GPU, torch.bfloat16)
    plan = model.plan(x)
    steps = (*plan.forward, *plan.backward)
    assert plan.target == "cuda" and all(isinstance(s.task, KernelTask) for s in steps)
    return model


def large(width: int) -> torch.Tensor:
    """Normal numbers, ROWS_BEYOND rows more than there is room for in BEYOND elements."""
    rows = -(-BEYOND // width) + ROWS_BEYOND
    x = torch.empty(rows, width, device=GPU, dtype=torch.bfloat16).normal_()
    assert x[-ROWS_BEYOND:].storage_offset() >= BEYOND > x[-AROUND:].storage_offset()
    return x


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Compare up to a rounding to bfloat16 or two."""
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=float(wanted.abs().max()) * 2**-8)


# (ops, features): pointwise, a row held by registers (few and many rows), a row that is read again from L2
MODELS = {
    "pointwise": ((ops.Bias(4096), ops.GELU()), 4096),
    "RMSNorm": ((ops.RMSNorm(4096),), 4096),
    "LayerNorm": ((ops.LayerNorm(4096),), 4096),
    "LayerNorm of short rows": ((ops.LayerNorm(96),), 96),
    "LayerNorm of long rows": ((ops.LayerNorm(65536),), 65536),
}


@pytest.mark.parametrize("name", MODELS)
def test_forward(name: str) -> None:
    need(2)
    parts, width = MODELS[name]
    x = large(width)
    model = generated(x, *parts)
    with torch.no_grad():
        y = model(x)
        for rows in (slice(AROUND), slice(-AROUND, None)):
            close(y[rows], model(x[rows].clone()))


@pytest.mark.parametrize("name", MODELS)
def test_backward_with_column_sums(name: str) -> None:
    """Gradients arrive at the last rows alone, so that the sums over all rows are the sums over those."""
    need(4)
    parts, width = MODELS[name]
    x = large(width).requires_grad_()
    model = generated(x, *parts)
    dy = torch.zeros_like(x)
    dy[-AROUND:].normal_()
    last, dy_of_last = x.detach()[-AROUND:].clone().requires_grad_(), dy[-AROUND:].clone()
    dx, *sums = torch.autograd.grad(model(x), [x, *model.parameters()], dy)
    want, *sums_of_last = torch.autograd.grad(model(last), [last, *model.parameters()], dy_of_last)
    close(dx[-AROUND:], want)
    assert not dx[:AROUND].any() and not dx[-2 * AROUND : -AROUND].any()
    assert len(sums) == len(sums_of_last) > 0
    for found, wanted in zip(sums, sums_of_last, strict=True):
        close(found, wanted)


def test_masks() -> None:
    """Each element has a number of its own, which the draws depend on."""
    need(3)
    width = 4096
    x = large(width).fill_(1.0).requires_grad_()
    model = generated(x, ops.Dropout(0.3))
    torch.manual_seed(5)
    value, offset = draw_seed(GPU).tolist()
    torch.manual_seed(5)
    y = model(x)
    rows = torch.arange(len(x) - AROUND, len(x), device=GPU)
    bits = keep_bits(rows, width, value, offset, 0) >= threshold(0.3)
    assert torch.equal(y[-AROUND:] != 0, bits)
    (dx,) = torch.autograd.grad(y, x, x.detach())
    assert torch.equal(dx[-AROUND:], y[-AROUND:])

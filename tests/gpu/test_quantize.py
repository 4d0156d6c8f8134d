"""Numbers of 8 bits on a GPU: the same bytes as everywhere, and the largest magnitudes that kernels raise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen import cuda_loader
from te_fuser.codegen.description import KernelDescription
from te_fuser.dtypes import FLOAT8
from te_fuser.formula.float8 import rounded
from te_fuser.quantization import quantize
from tests.codegen.corpus import inputs
from tests.codegen.cuda_calls import complaints
from tests.codegen.targets import call, slots
from tests.codegen.test_float8 import FROM, LOOK, RAISING, TWICE, wanted
from tests.float8 import FORMATS, codes, every_number, nearest_codes, numbers, telling_numbers

GPU = torch.device("cuda", 0)
formats = pytest.mark.parametrize("dtype", FORMATS)


def run(d: KernelDescription, folder: Path, rows: int, *tensors: torch.Tensor, **options: Any) -> list[torch.Tensor]:
    """Outputs of a kernel on the GPU."""
    (kernel,) = cuda_loader.load([d], GPU, cache_dir=folder)
    named = {load.name: t for load, t in zip(d.loads, tensors, strict=True)}
    return call(kernel.run, d, named, rows, device="cuda", **options)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@formats
def test_every_byte(dtype: torch.dtype, given: torch.dtype) -> None:
    """By the GPU's own instruction, and by PyTorch's operations there."""
    x = (telling_numbers(dtype)[: 2**16] if given == torch.float32 else every_number(given)).reshape(-1, 64)
    model = te_fuser.Sequential(ops.Quantize(dtype), kernels="generated")
    for scale in (1.0, 3.1, 2.0**-9):
        expected = nearest_codes(x.float() * scale, dtype)
        by = torch.tensor(scale, device=GPU)
        assert torch.equal(codes(model(x.cuda(), scale=by)).cpu(), expected)
        assert torch.equal(codes(model.reference(x.cuda(), scale=by)).cpu(), expected)
        assert torch.equal(codes(quantize(x.cuda(), dtype, by).data).cpu(), expected)


@formats
def test_float64_in_pytorch(dtype: torch.dtype) -> None:
    x = telling_numbers(dtype).double()
    assert torch.equal(codes(rounded(x.cuda(), dtype)).cpu(), nearest_codes(x, dtype))


@pytest.mark.parametrize(("dtype", "width"), [(name, width) for name in FLOAT8 for width in (1, 2, 16)])
def test_every_code_that_is_read(dtype: str, width: int, folder: Path) -> None:
    x = torch.arange(256, dtype=torch.uint8).reshape(-1, width).view(FLOAT8[dtype])
    (y,) = run(FROM[dtype, width], folder, x.shape[0], x)
    expected = 2 * numbers(FLOAT8[dtype]).reshape(-1, width)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_who_reads_it_in_the_same_kernel(dtype: str, folder: Path) -> None:
    x = telling_numbers(FLOAT8[dtype])[: 2**15].reshape(-1, 16)
    y, twice = run(TWICE[dtype], folder, x.shape[0], x, torch.tensor(0.7))
    assert torch.equal(codes(y).cpu(), nearest_codes(x * 0.7, FLOAT8[dtype]))
    torch.testing.assert_close(twice, 2 * y.float(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("given", "share"), [(torch.float32, 1e-4), (torch.bfloat16, 0.03)])
@formats
def test_fused_against_unfused(dtype: torch.dtype, given: torch.dtype, share: float) -> None:
    model = te_fuser.Sequential(ops.LayerNorm(4096), ops.GELU(), ops.Quantize(dtype), kernels="generated")
    model = model.to(GPU, given)
    x = torch.randn(512, 4096, device=GPU, generator=torch.Generator(GPU).manual_seed(0)).to(given).requires_grad_()
    scale = torch.tensor(37.3, device=GPU)
    found, expected = (run(x, scale=scale) for run in (model, model.reference))
    apart = (codes(found.detach()).int() - codes(expected.detach()).int()).abs()
    assert apart.max() <= 1 and (apart > 0).float().mean() <= share
    dy = torch.randn(512, 4096, device=GPU, generator=torch.Generator(GPU).manual_seed(1)).to(dtype)
    ours, plain = (torch.autograd.grad(y, [x, *model.parameters()], dy) for y in (found, expected))
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.parametrize("name", RAISING)
def test_largest_magnitudes_beside_stores(name: str, folder: Path) -> None:
    d = RAISING[name]
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (513, (3, 19))):
        on_cpu, raised = inputs(d, rows, batch[1], seed=rows), slots(d, device="cuda")
        made = run(d, folder, rows, *on_cpu.values(), batch=batch, raised=raised)
        assert not complaints(d, on_cpu, made, rows, batch)
        assert [t.item() for t in raised.values()] == pytest.approx(wanted(d, on_cpu, rows, batch), rel=1e-5)


def test_largest_magnitude_of_many_blocks(folder: Path) -> None:
    d, largest = LOOK[64], torch.zeros((), device=GPU)
    raised = slots(d, device="cuda")
    slot = raised["amax"]
    x = torch.randn(200_003, 64, device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    for factor in (1.0, 0.5, 3.0):
        run(d, folder, x.shape[0], factor * x, raised=raised)
        largest = torch.maximum(largest, (0.5 * (factor * x)).abs().max())
        assert slot.item() == largest.item()
    x[199_999, 63] = -math.inf
    run(d, folder, x.shape[0], x, raised=raised)
    assert slot.item() == math.inf
    x[3, 0] = math.nan
    run(d, folder, x.shape[0], x, raised=raised)
    assert slot.isnan().all()

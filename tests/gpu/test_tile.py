"""Kernels that store 8 bits transposed, on a GPU: bytes of both layouts, column sums and maxima."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from te_fuser.codegen import cuda_loader
from te_fuser.codegen.cuda_loader import GpuKernel
from te_fuser.codegen.description import KernelDescription
from te_fuser.codegen.interpreted import InterpretedKernel
from te_fuser.dtypes import FLOAT8
from te_fuser.quantization import quantize
from tests.codegen import tile_cases
from tests.codegen.corpus import Kit, inputs
from tests.codegen.targets import call, slots
from tests.float8 import FORMATS, codes

GPU = torch.device("cuda", 0)
CASES = tile_cases.cases()


def load(d: KernelDescription, folder: Path) -> GpuKernel:
    (kernel,) = cuda_loader.load([d], GPU, cache_dir=folder)
    return kernel


def check(kernel: GpuKernel, rows: int, batch: tuple[int, int] = (1, 1)) -> None:
    d = kernel.description
    tensors, raised = inputs(d, rows, batch[1], seed=rows), slots(d, device="cuda")
    made = call(kernel.run, d, tensors, rows, batch, raised, "cuda")
    largest = [t.item() for t in raised.values()]
    tile_cases.check(d, tensors, [t.cpu() for t in made], largest, rows, batch)


@pytest.mark.parametrize("name", CASES)
def test_values(name: str, folder: Path) -> None:
    kernel = load(CASES[name], folder)
    for rows, batch in ((0, (1, 1)), (1, (1, 1)), (24, (4, 3)), (2051, (1, 1))):
        check(kernel, rows, batch)


@pytest.mark.parametrize("family", tile_cases.FAMILIES, ids=lambda f: f.__name__)
def test_every_schedule_gives_the_same(family: tile_cases.Family, folder: Path) -> None:
    d = family(Kit("bfloat16", "bfloat16"), 4096, "float8_e4m3fn")
    for schedules in cuda_loader.variants(d, GPU, 8):
        check(cuda_loader.load_variant(d, GPU, schedules, cache_dir=folder), 301)


@pytest.mark.parametrize("read", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_the_bytes_of_a_quantized_tensor(dtype: torch.dtype, read: torch.dtype, folder: Path) -> None:
    names = {v: k for k, v in FLOAT8.items()}
    text = str(read).removeprefix("torch.")
    kernel = load(tile_cases.plain(Kit(text, text), 4096, names[dtype]), folder)
    x = 500 * torch.randn(8190, 4096, device=GPU, generator=torch.Generator(GPU).manual_seed(0)).to(read)
    x[3, 700], x[8189, 4095] = -torch.inf, torch.nan
    given, raised = {"x": x, "scale": torch.tensor([1.7])}, slots(kernel.description, device="cuda")
    y, transposed = call(kernel.run, kernel.description, given, 8190, raised=raised, device="cuda")
    wanted = quantize(x, dtype, 1.7)
    assert torch.equal(codes(y), codes(wanted.data)) and torch.equal(codes(transposed), codes(wanted.transposed))
    assert raised["amax"].isnan()


def steps(t: torch.Tensor) -> torch.Tensor:
    """Neighbours are one apart, and 0 is -0."""
    size = (codes(t) & 0x7F).int()
    return torch.where(codes(t) >= 0x80, -size, size)


@pytest.mark.parametrize("family", [tile_cases.gelu, tile_cases.gelu_slope], ids=lambda f: f.__name__)
@pytest.mark.parametrize("width", [4096, 16384])
def test_as_on_the_cpu(family: tile_cases.Family, width: int, folder: Path) -> None:
    """Bytes are one step apart at most, where functions err in their last place; and a call repeats bit for bit."""
    d = family(Kit("bfloat16", "bfloat16"), width, "float8_e5m2")
    kernel, tensors, rows = load(d, folder), inputs(d, 1000), 1000
    raised, wanted = slots(d, device="cuda"), slots(d)
    found = call(kernel.run, d, tensors, rows, raised=raised, device="cuda")
    expected = call(InterpretedKernel(d), d, tensors, rows, raised=wanted)
    for s, ours, theirs in zip(d.stores, found, expected, strict=False):
        apart = (steps(ours.cpu()) - steps(theirs)).abs()
        assert apart.max() <= 1 and (apart > 0).float().mean() <= 1e-3, s.name
    for ours, theirs in zip(found[len(d.stores) :], expected[len(d.stores) :], strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-3)
    assert [t.item() for t in raised.values()] == pytest.approx([t.item() for t in wanted.values()], rel=1e-5)
    again = call(kernel.run, d, tensors, rows, device="cuda")
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(found, again, strict=True))


def test_a_tensor_beyond_32_bits(folder: Path) -> None:
    rows, width = 2**17 + 5, 2**14
    kernel = load(tile_cases.turned(Kit(), width, "float8_e4m3fn"), folder)
    x = torch.randint(0, 0x7F, (rows, width), dtype=torch.uint8, device=GPU).view(torch.float8_e4m3fn)
    (y,) = call(kernel.run, kernel.description, {"x": x}, rows, device="cuda")
    for column in (0, 1, width - 1):
        assert torch.equal(codes(y)[column, :rows], codes(x)[:, column])
    for row in (0, rows - 1):
        assert torch.equal(codes(y)[:, row], codes(x)[row])
    assert not codes(y)[:, rows:].any()

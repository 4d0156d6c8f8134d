"""Numbers of 8 bits on a GPU: the same bytes as everywhere, and the largest magnitudes that kernels raise."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen import cuda_loader
from te_fuser.codegen.description import KernelDescription
from te_fuser.dtypes import FLOAT8
from te_fuser.formula.float8 import rounded
from te_fuser.kernels import quantized_matmul
from te_fuser.quantization import quantize
from tests.codegen.corpus import inputs, outputs
from tests.codegen.cuda_calls import FIRST_STREAM, OFFSET, SEED, complaints
from tests.codegen.test_float8 import FROM, TWICE
from tests.codegen.test_maxima import LOOK, RAISING, slots, wanted
from tests.float8 import E4M3, E5M2, FORMATS, codes, every_number, nearest_codes, numbers, telling_numbers

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
formats = pytest.mark.parametrize("dtype", FORMATS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cubins")


def call(
    d: KernelDescription, folder: Path, rows: int, *tensors: torch.Tensor, batch: tuple[int, int] = (1, 1)
) -> list[torch.Tensor]:
    """What a kernel stores of loads, numbers to raise and the seed, all on the GPU."""
    (kernel,) = cuda_loader.load([d], GPU, cache_dir=folder)
    made = outputs(d, rows, batch[1], device="cuda")
    seed = (torch.tensor([SEED, OFFSET], device=GPU),) if d.streams else ()
    numbers_of_streams = tuple(range(FIRST_STREAM, FIRST_STREAM + len(d.streams)))
    kernel.run((*tensors, *seed, *made), rows, *batch, numbers_of_streams)
    return made


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
    (y,) = call(FROM[dtype, width], folder, x.shape[0], x.cuda())
    expected = 2 * numbers(FLOAT8[dtype]).reshape(-1, width)
    torch.testing.assert_close(y.cpu().double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_who_reads_it_in_the_same_kernel(dtype: str, folder: Path) -> None:
    x = telling_numbers(FLOAT8[dtype])[: 2**15].reshape(-1, 16)
    y, twice = call(TWICE[dtype], folder, x.shape[0], x.cuda(), torch.tensor(0.7, device=GPU))
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
        on_cpu, raised = inputs(d, rows, batch[1], seed=rows), [t.cuda() for t in slots(d).values()]
        made = call(d, folder, rows, *(t.cuda() for t in on_cpu.values()), *raised, batch=batch)
        assert not complaints(d, on_cpu, made, rows, batch)
        assert [t.item() for t in raised] == pytest.approx(wanted(d, on_cpu, rows, batch), rel=1e-5)


def test_largest_magnitude_of_many_blocks(folder: Path) -> None:
    d, slot = LOOK[64], torch.zeros(1, device=GPU)
    x = torch.randn(200_003, 64, device=GPU, generator=torch.Generator(GPU).manual_seed(0))
    for factor in (1.0, 0.5, 3.0):
        call(d, folder, x.shape[0], factor * x, slot)
        assert slot.item() == max(1.0, factor) * 0.5 * x.abs().max().item()
    x[199_999, 63] = -math.inf
    call(d, folder, x.shape[0], x, slot)
    assert slot.item() == math.inf
    x[3, 0] = math.nan
    call(d, folder, x.shape[0], x, slot)
    assert slot.isnan().all()


PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]


@pytest.fixture
def narrow_products() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no instructions for products of 8 bits")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda p: "-".join(str(d)[12:] for d in p))
def test_products(narrow_products: None, pair: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype) -> None:
    """x W^T, with a bias where the result is of 16 bits, onto float32, of few tokens and many."""
    rng = torch.Generator(GPU).manual_seed(0)
    for m, n, k in ((1024, 512, 2048), (17, 48, 16), (1, 16, 4096)):
        a, b = (torch.randn(rows, k, device=GPU, generator=rng) for rows in (m, n))
        qa, qb = (quantize(t, d, torch.finfo(d).max / t.abs().max()) for t, d in zip((a, b), pair, strict=True))
        given = (qa.data, qa.scale_inverse, qb.data, qb.scale_inverse)
        exact = (qa.data.double() * qa.scale_inverse.double()) @ (qb.data.double() * qb.scale_inverse.double()).mT
        scale = exact.abs().max().item()
        assert quantized_matmul.refusal(*pair, out_dtype, (m, n, k), GPU) is None
        for fast in (False, True):
            eps = torch.finfo(out_dtype).eps + (4e-3 if fast else 1e-3)
            found = quantized_matmul.multiply(*given, out_dtype, fast=fast)
            assert found.dtype == out_dtype and (found.double() - exact).abs().max() <= eps * scale
            if out_dtype != torch.float32:
                bias = torch.randn(n, device=GPU, generator=rng).to(out_dtype)
                found = quantized_matmul.multiply(*given, out_dtype, bias, fast)
                assert (found.double() - exact - bias.double()).abs().max() <= eps * (scale + 4.0)
        if out_dtype == torch.float32:
            onto = torch.ones(m, n, device=GPU)
            quantized_matmul.add_onto(*given, onto)
            assert (onto.double() - exact - 1.0).abs().max() <= 1e-3 * scale
    why = quantized_matmul.refusal(*pair, out_dtype, (16, 16, 40), GPU)
    assert why is not None and "multiples of 16" in why


def test_the_three_products_of_a_layer(narrow_products: None) -> None:
    rng, tokens, features, out = torch.Generator(GPU).manual_seed(0), 1000, 512, 768
    sizes = ((tokens, features), (out, features), (tokens, out))
    x, w, dy = (torch.randn(*size, device=GPU, generator=rng) for size in sizes)
    qx, qw, qdy = (quantize(t, d, torch.finfo(d).max / t.abs().max()) for t, d in ((x, E4M3), (w, E4M3), (dy, E5M2)))
    products = {
        "y": (qx, qx.data, qw, qw.data, x @ w.mT),
        "dx": (qdy, qdy.data, qw, qw.transposed, dy @ w),
        "dw": (qdy, qdy.transposed, qx, qx.transposed, dy.mT @ x),
    }
    for name, (a, first, b, second, plain) in products.items():
        found = quantized_matmul.multiply(first, a.scale_inverse, second, b.scale_inverse, torch.float32)
        apart = (found - plain).square().mean().sqrt() / plain.square().mean().sqrt()
        assert found.shape == plain.shape and apart < 0.1, name


def test_a_captured_product_reads_its_scales_at_each_replay(narrow_products: None) -> None:
    rng = torch.Generator(GPU).manual_seed(0)
    a, b = (quantize(torch.randn(64, 64, device=GPU, generator=rng), E4M3, 100.0) for _ in range(2))
    scale = torch.ones((), device=GPU)

    def run() -> torch.Tensor:
        return quantized_matmul.multiply(a.data, scale, b.data, b.scale_inverse, torch.float32)

    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    scale.fill_(3.0)
    graph.replay()
    torch.testing.assert_close(found, 3.0 * first)

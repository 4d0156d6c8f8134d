"""Matrices of 8 bits turned, and weights quantized in one launch, on a GPU: the bytes of the definitions."""

from __future__ import annotations

import functools

import pytest
import torch

from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import Weight8, quantizer_on
from te_fuser.quantization import quantize
from tests.float8 import E4M3, FORMATS, codes, every_number, telling_numbers
from tests.gpu.captures import captured
from tests.kernels import test_quantizers as cases

LARGE = [(8192, 4096), (8191, 4096), (4096, 16384), (70_001, 128), (16, 65536)]


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("size", [*cases.SIZES, *cases.NOTHING, *LARGE])
def test_turned(size: tuple[int, int], dtype: torch.dtype) -> None:
    data = cases.bytes_like(*size, dtype, "cuda")
    assert not cases.turned_wrongly(data, quantizers.transpose_by_kernel(data))


def test_more_than_4_gigabytes_are_turned() -> None:
    """Offsets are 64 bits wide."""
    tokens, features = 2**20 + 3, 4224
    if torch.cuda.mem_get_info()[0] < 3 * tokens * features:
        pytest.skip("needs 14 GB")
    data = torch.randint(0, 256, (tokens, features), dtype=torch.uint8, device="cuda")
    turned = quantizers.transpose_by_kernel(data.view(E4M3)).view(torch.uint8)
    for at in (0, 2**19 + 77, 2**20 - 128):
        assert torch.equal(turned[:, at : at + 128], data[at : at + 128].mT)
    assert torch.equal(turned[:, tokens - 3 : tokens], data[-3:].mT) and not turned[:, tokens:].any()


def test_what_lies_otherwise_is_copied() -> None:
    data = cases.bytes_like(300, 1024, E4M3, "cuda")
    for given in (data[:, 16:528], data.view(torch.uint8).mT.contiguous().view(E4M3).mT, data[3:]):
        wanted = given.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(E4M3)
        assert not cases.turned_wrongly(wanted, quantizers.transpose_by_kernel(given))


GPU = torch.device("cuda", 0)
on_gpu = functools.partial(quantizer_on, GPU)


@pytest.mark.parametrize("dtypes", [*((dtype,) for dtype in cases.DTYPES), cases.DTYPES])
def test_weights(dtypes: tuple[torch.dtype, ...]) -> None:
    assert not cases.run_weights(cases.weights_like(dtypes, "cuda"), on_gpu)


@pytest.mark.parametrize("count", [72, 73, 300])
def test_many(count: int) -> None:
    """More than one launch takes."""
    assert not cases.run_weights([torch.full((16, 32), float(k), device=GPU) for k in range(count)], on_gpu)


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_every_number(dtype: torch.dtype) -> None:
    x = (telling_numbers(E4M3)[: 2**16] if dtype == torch.float32 else every_number(dtype)).reshape(-1, 64).cuda()
    usual = x.nan_to_num(0.0, posinf=3.0, neginf=-3.0)
    scales, amaxes = torch.tensor([3.1, 0.02], device=GPU).unbind(), torch.zeros(2, device=GPU).unbind()
    found = cases.quantize_weights([x, usual], scales, amaxes)
    assert not cases.weights_wrongly([x, usual], scales, found, [0.0, 0.0], amaxes)


@pytest.mark.parametrize("wanted", ["rows", "turned", "both"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_what_nobody_wants_is_not_made(dtype: torch.dtype, wanted: str) -> None:
    rows, turned = wanted != "turned", wanted != "rows"
    for w in (*cases.weights_like((dtype,), "cuda"), torch.randn(4096, 1040, device=GPU).to(dtype)):
        scale, slot = torch.tensor(31.0, device=GPU), torch.zeros((), device=GPU)
        exact = quantize(w, E4M3, scale)
        found = on_gpu([Weight8(dtype, rows, turned, True)])(w, scale, slot)
        assert torch.equal(slot, exact.amax)
        expected = [exact.data] * rows + [exact.transposed] * turned
        for ours, right in zip(found if len(expected) > 1 else (found,), expected, strict=True):
            assert torch.equal(codes(ours), codes(right)), w.shape


def test_the_weights_of_a_model() -> None:
    """Of several layers; amaxes keep what they were raised to before."""
    shapes = [(12288, 4096), (4096, 4096), (16384, 4096), (4096, 16384)] * 2
    weights = [torch.randn(*shape, device=GPU, dtype=torch.bfloat16) for shape in shapes]
    scales, amaxes = torch.full((8,), 60.0, device=GPU).unbind(), torch.zeros(8, device=GPU).unbind()
    for factor in (1.0, 0.25):
        weights[3].mul_(factor)
        before = [amax.item() for amax in amaxes]
        assert not cases.weights_wrongly(
            weights, scales, cases.quantize_weights(weights, scales, amaxes), before, amaxes
        )


def test_streams_have_results_of_their_own() -> None:
    weights, scales = cases.weights_like((torch.bfloat16,), "cuda"), torch.full((7,), 3.0, device=GPU)
    streams, found = [torch.cuda.Stream() for _ in range(3)], []
    for k, stream in enumerate(streams):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found += [cases.quantize_weights(weights, (scales * (k + 1)).unbind()) for _ in range(5)]
    torch.cuda.synchronize()
    for k, results in enumerate(found):
        assert not cases.weights_wrongly(weights, (scales * (k // 5 + 1)).unbind(), results, [0.0] * 7)


def test_captured() -> None:
    """A replay reads weights and scales anew."""
    weights, scales = cases.weights_like((torch.float32,), "cuda"), torch.full((7,), 3.0, device=GPU)
    amaxes = torch.zeros(7, device=GPU)
    graph, found = captured(lambda: cases.quantize_weights(weights, scales.unbind(), amaxes.unbind()))
    weights[0].mul_(2.0)
    scales.mul_(0.5)
    before = amaxes.tolist()
    graph.replay()
    assert not cases.weights_wrongly(weights, scales.unbind(), found, before, amaxes.unbind())
    assert codes(found[0][0]).any()

"""Matrices by scales that follow from themselves: the kernels run on the CPU, and compiled for the GPUs there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import nvrtc
from te_fuser.kernels import own_scales, transposed8
from te_fuser.kernels.own_scales import LargestMagnitude, QuantizeByAmax
from te_fuser.ops.own_scales import Scaling, quantized
from tests.codegen import ptx
from tests.fake_cuda import FakeDriver, compile_driver, emulate, in_place, in_place_of_written
from tests.float8 import E4M3, E5M2, codes
from tests.kernels.weights8 import DTYPES, NOTHING, SIZES
from tests.needs import needs_compiler, needs_nvrtc

WANTED = ("rows", "turned", "both")
MEASURES = [LargestMagnitude(dtype) for dtype in DTYPES]
BY_AMAX = [
    *(QuantizeByAmax(dtype, narrow, w) for dtype, narrow, w in itertools.product(DTYPES, (E4M3, E5M2), WANTED)),
    QuantizeByAmax(torch.bfloat16, E4M3, power_of_two=True, epsilon=0.25),
]
KERNELS = [*MEASURES, *BY_AMAX]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    """The kernels run by a driver that executes them on the CPU."""
    folder = tmp_path_factory.mktemp("own_scales")
    native = emulate(KERNELS, folder)
    with in_place_of_written(native.__getitem__), in_place(compile_driver(folder)) as driver:
        yield driver


def matrix(tokens: int, features: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(tokens * 31 + features)
    return (torch.randn(tokens, features, generator=rng) * scale).to(dtype)


def check(x: torch.Tensor, kernel: QuantizeByAmax) -> None:
    """The bytes of the definition, what is behind the tokens, and the reciprocal of the scale."""
    amax, inverse = torch.zeros(2).unbind()
    own_scales.measure(x, amax)
    scaling = Scaling(None, kernel.power_of_two, kernel.epsilon)
    rows, turned = own_scales.quantize_by_amax(x, amax, inverse, kernel.narrow, scaling, kernel.wanted)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    data, wanted = quantized(flat, kernel.narrow, scaling)
    if x.numel():
        assert inverse == wanted
        torch.testing.assert_close(amax, flat.abs().max().float(), rtol=0, atol=0, equal_nan=True)
    if kernel.wanted != "turned":
        assert rows.shape == x.shape and rows.dtype == kernel.narrow
        assert torch.equal(codes(rows).flatten(), codes(data).flatten())
    if kernel.wanted != "rows":
        right = transposed8.by_torch(data)
        assert turned.shape == right.shape and torch.equal(codes(turned), codes(right))


@needs_compiler
@pytest.mark.parametrize("kernel", BY_AMAX, ids=lambda k: f"{str(k.dtype)[6:]}-{str(k.narrow)[13:]}-{k.wanted}")
def test_bytes_are_those_of_the_definition(kernel: QuantizeByAmax, emulated: FakeDriver) -> None:
    for size in (*SIZES, *NOTHING):
        check(matrix(*size, kernel.dtype), kernel)
    check(matrix(30, 48, kernel.dtype).view(5, 6, 48), kernel)


@needs_compiler
@pytest.mark.parametrize("number", [0.0, math.inf, -math.inf, math.nan, 1e-30, 3e38, 7.0])
def test_special_numbers(number: float, emulated: FakeDriver) -> None:
    for fill, kernel in itertools.product((0.0, 1e-3), (BY_AMAX[2], BY_AMAX[-1])):
        x = torch.full((33, 32), fill).to(kernel.dtype)
        x[17, 5] = number
        check(x, kernel)


@needs_compiler
def test_what_lies_otherwise_is_copied(emulated: FakeDriver) -> None:
    for x in (
        torch.randn(32, 64)[:, 16:],
        torch.randn(32 * 48 + 1)[1:].view(32, 48),
        torch.randn(48, 32).mT,
        torch.nn.Parameter(torch.randn(16, 16)),
    ):
        check(x, QuantizeByAmax(torch.float32, E4M3))


@needs_compiler
def test_one_launch_each(emulated: FakeDriver) -> None:
    """An amax is raised, and never lowered."""
    x, amax, inverse = matrix(300, 272, torch.bfloat16), torch.tensor(100.0), torch.zeros(())
    emulated.launches = 0
    own_scales.measure(x, amax)
    assert amax == 100.0 and emulated.launches == 1
    own_scales.quantize_by_amax(x, amax, inverse, E4M3, Scaling(), "both")
    assert inverse == (torch.tensor(448.0) / 100.0).reciprocal() and emulated.launches == 2


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    for kernel in KERNELS:
        compiled = nvrtc.compile_source(kernel.text(), arch, name=kernel.name, cache=tmp_path)
        assert {r.symbol for r in compiled.resources} == {kernel.name}
        assert all(r.spilled_bytes == 0 and r.stack_bytes == 0 for r in compiled.resources), (kernel, compiled)


@needs_nvrtc
def test_they_wait_before_they_touch_memory() -> None:
    for kernel in (LargestMagnitude(torch.bfloat16), QuantizeByAmax(torch.bfloat16, E4M3)):
        assert not ptx.too_early(kernel.text(), "sm_90a")

"""Matrices by scales of blocks that follow from themselves: kernels run on the CPU, and compiled for GPUs."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import QuantizeBlocks
from te_fuser.ops.blockwise_scaling import quantized
from te_fuser.recipe import OwnScales, QParams
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, E5M2, codes
from tests.kernels.emulated import emulating
from tests.kernels.weights8 import DTYPES, NOTHING, SIZES
from tests.needs import needs_compiler

WANTED = ("rows", "turned", "both")
BLOCKS = [
    *(QuantizeBlocks(dtype, E4M3, w, square) for dtype, w, square in itertools.product(DTYPES, WANTED, (False, True))),
    *(QuantizeBlocks(torch.bfloat16, E5M2, w) for w in WANTED),
    QuantizeBlocks(torch.bfloat16, E4M3, power_of_two=False, epsilon=0.25),
]


emulated = emulating(lambda: BLOCKS)


def matrix(tokens: int, features: int, dtype: torch.dtype, scale: float = 3.0) -> torch.Tensor:
    rng = torch.Generator().manual_seed(tokens * 31 + features)
    return (torch.randn(tokens, features, generator=rng) * scale).to(dtype)


def check_blocks(x: torch.Tensor, kernel: QuantizeBlocks) -> None:
    """The bytes of the definition by rows and turned, zeros behind the tokens, and scales as products take them."""
    scaling = OwnScales(QParams(kernel.power_of_two, kernel.epsilon), (128, 128) if kernel.square else (1, 128))
    rows, turned = quantizers.BlocksOf(kernel)(x)
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    tokens, features = flat.shape
    for side, found, given in (("rows", rows, flat), ("turned", turned, flat.mT)):
        if kernel.wanted not in (side, "both"):
            assert not found[0].numel()
            continue
        data, inverse = quantized(given, kernel.narrow, scaling)
        whole = side == "rows" and tokens % 4 == 0
        room = tokens if whole else quantizers.padded(tokens)
        ours = found[0].reshape(room, features) if side == "rows" else found[0].mT
        assert found[0].dtype == kernel.narrow and ours.shape == (room, features) and found[0].is_contiguous()
        assert found[0].shape == x.shape if whole else True
        right = data if side == "rows" else data.mT
        assert torch.equal(codes(ours)[:tokens], codes(right)) and not codes(ours)[tokens:].any()
        lies = inverse if kernel.square else inverse.mT
        scales = found[1][: lies.shape[0], : lies.shape[1]]
        assert torch.equal(scales, lies) or not x.numel(), side
        assert found[1].shape[1] % 4 == 0 and found[1].is_contiguous()


@needs_compiler
@pytest.mark.parametrize(
    "kernel", BLOCKS, ids=lambda k: f"{str(k.dtype)[6:]}-{str(k.narrow)[13:]}-{k.wanted}-{k.square}-{k.power_of_two}"
)
def test_blocks(kernel: QuantizeBlocks, emulated: FakeDriver) -> None:
    for tokens, features in (*SIZES, (128, 272), (3, 128), *NOTHING):
        spread = torch.exp2((torch.arange(tokens)[:, None] * 5 + torch.arange(features) // 8 * 3) % 23 - 11.0)
        check_blocks(matrix(tokens, features, kernel.dtype) * spread.to(kernel.dtype), kernel)
    check_blocks(matrix(30, 128, kernel.dtype).view(5, 6, 128), kernel)
    if not kernel.square:
        emulated.launches = 0
        check_blocks(matrix(64, 384, kernel.dtype).view(4, 16, 384), kernel)
        assert emulated.launches == 1


@needs_compiler
@pytest.mark.parametrize("number", [0.0, math.inf, math.nan, 1e-30, 3e38, 7.0])
def test_special_numbers_in_blocks(number: float, emulated: FakeDriver) -> None:
    for fill, kernel in itertools.product((0.0, 1e-3), (BLOCKS[4], BLOCKS[5], BLOCKS[-1])):
        x = torch.full((132, 256), fill).to(kernel.dtype)
        x[17, 5] = x[129, 200] = number
        check_blocks(x, kernel)


@needs_compiler
def test_what_lies_otherwise_is_copied(emulated: FakeDriver) -> None:
    for x in (
        torch.randn(32, 64)[:, 16:],
        torch.randn(32 * 48 + 1)[1:].view(32, 48),
        torch.randn(48, 32).mT,
        torch.nn.Parameter(torch.randn(16, 16)),
    ):
        check_blocks(x, QuantizeBlocks(torch.float32, E4M3))


def test_refused_in_words() -> None:
    for shape in ((3, 40), (2**31, 16)):
        with pytest.raises(ValueError, match=r"multiples of 16 and up to 2147483520 rows, got \[\d+, \d+\]"):
            quantizers.BlocksOf(BLOCKS[0])(torch.empty(shape, device="meta"))

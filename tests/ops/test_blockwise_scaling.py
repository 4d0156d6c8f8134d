"""Scales that numbers get from themselves: of a tensor, of each of its blocks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from te_fuser.ops.blockwise_scaling import dequantized, quantized, scales_of
from te_fuser.recipe import OwnScales, QParams
from tests.float8 import E4M3, E5M2
from tests.ops.check import normal


def by_hand(amax: float, largest: float, scaling: OwnScales) -> float:
    """The scale of an amax, by Python's numbers rounded to float32 where the formula says so."""
    amax = max(amax, float(torch.tensor(float(scaling.by.amax_epsilon)))) if not math.isnan(amax) else amax
    if not 0.0 < amax < math.inf:
        return 1.0
    scale = torch.tensor(largest, dtype=torch.float32) / torch.tensor(amax, dtype=torch.float32)
    found = min(float(scale), torch.finfo(torch.float32).max)
    return 2.0 ** (math.frexp(found)[1] - 1) if scaling.by.power_2_scale else found


def blocks_of(t: torch.Tensor, block: tuple[int, int] | None) -> Any:
    """(place among blocks, the numbers) of each block."""
    height, width = t.shape if block is None else block
    down, across = range(0, t.shape[0], height), range(0, t.shape[1], width)
    for (i, top), (j, left) in itertools.product(enumerate(down), enumerate(across)):
        yield (i, j), (slice(top, top + height), slice(left, left + width))


@pytest.mark.parametrize("shape", [(5, 300), (130, 256), (1, 16), (256, 128)])
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128), (1, 32)])
@pytest.mark.parametrize("power", [False, True])
def test_each_block_has_the_scale_of_its_amax(
    shape: tuple[int, int], block: tuple[int, int] | None, power: bool
) -> None:
    scaling, spans = OwnScales(QParams(power, 1e-3), block), torch.exp2(torch.arange(shape[1]) / 16 - 12)
    t = (normal(*shape) * spans).float()
    for dtype in (E4M3, E5M2):
        largest, scales = torch.finfo(dtype).max, scales_of(t, dtype, scaling)
        data, inverse = quantized(t, dtype, scaling)
        assert data.dtype == dtype and data.shape == t.shape and scales.dtype == inverse.dtype == torch.float32
        for place, at in blocks_of(t, block):
            scale = scales if block is None else scales[place]
            assert scale.item() == by_hand(t[at].abs().max().item(), largest, scaling)
            wide = t[at].double() * scale.double()
            assert (data[at].double() - wide).abs().max() <= largest * torch.finfo(dtype).eps / 2
            number = inverse if block is None else inverse[place]
            assert number == scale.reciprocal()
        rtol, least = (0.125, 2.0**-16) if dtype == E4M3 else (0.25, 2.0**-30)
        torch.testing.assert_close(dequantized(t, dtype, scaling), t, rtol=rtol, atol=least * t.abs().max().item())


SPECIAL = {
    "zeros": ([0.0, 0.0], 0.0, False, 1.0),
    "negative zeros": ([-0.0, 0.0], 0.0, True, 1.0),
    "infinite": ([math.inf, 1.0], 0.0, False, 1.0),
    "nan": ([math.nan, 1.0], 0.0, False, 1.0),
    "nan with epsilon": ([math.nan, 1.0], 1.0, True, 1.0),
    "zeros with epsilon": ([0.0, 0.0], 0.5, False, 896.0),
    "least": ([0.25, 0.0], 0.5, False, 896.0),
    "power": ([1.0, -0.5], 0.0, True, 256.0),
    "whole power": ([7.0, 0.0], 0.0, True, 64.0),
    "just above": ([7.0000005, 0.0], 0.0, True, 32.0),
    "too small": ([1e-40, 0.0], 0.0, False, torch.finfo(torch.float32).max),
    "too small for a power": ([1e-40, 0.0], 0.0, True, 2.0**127),
    "largest": ([torch.finfo(torch.float32).max, 0.0], 0.0, True, 2.0**-120),
    "empty": ([], 0.0, False, 1.0),
}


@pytest.mark.parametrize("case", SPECIAL)
@pytest.mark.parametrize("block", [None, (1, 128), (128, 128)])
def test_special_numbers(case: str, block: tuple[int, int] | None) -> None:
    numbers, epsilon, power, wanted = SPECIAL[case]
    t = torch.tensor([numbers], dtype=torch.float32)
    scales = scales_of(t, E4M3, OwnScales(QParams(power, epsilon), block))
    assert scales.unique().tolist() == ([wanted] if scales.numel() else [])
    kept = dequantized(t, E4M3, OwnScales(QParams(power, epsilon), block))
    assert torch.equal(kept.isnan(), t.isnan()) and kept.shape == t.shape


def test_float64_has_scales_of_float64() -> None:
    t = normal(3, 7)
    scale = scales_of(t, E4M3, OwnScales(QParams()))
    assert scale.dtype == torch.float64 and scale == 448.0 / t.abs().max()
    assert dequantized(t, E4M3, OwnScales(QParams(True), (1, 4))).dtype == torch.float64

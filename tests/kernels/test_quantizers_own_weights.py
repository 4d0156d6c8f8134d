"""Scales of amaxes by PyTorch, which `tests/codegen/test_maxima.py` has of kernels; weights by scales of their own."""

from __future__ import annotations

import math

import pytest
import torch

from te_fuser.codegen.description import ScaleOf
from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import OwnWeights, QuantizeWeights, Weight8, measuring_weights
from te_fuser.ops.blockwise_scaling import quantized, scale_by
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, E5M2, PLAIN, POWERS, WAYS, codes
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

B16, F32 = torch.bfloat16, torch.float32

emulated = emulating(lambda: [QuantizeWeights(), *map(measuring_weights, (PLAIN, POWERS))])


@needs_compiler
@pytest.mark.parametrize("mixed", [False, True])
def test_bytes(emulated: FakeDriver, mixed: bool) -> None:
    """Those of the definition, in the layouts that are wanted; by one launch each where all have one rule."""
    wanted = [Weight8(B16), Weight8(F32, turned=False), Weight8(B16, rows=False), Weight8(B16)]
    scalings = [PLAIN, POWERS if mixed else PLAIN, PLAIN, PLAIN]
    rng = torch.Generator().manual_seed(0)
    sizes = ((48, 16), (272, 128), (16, 160), (32, 32))
    weights = [
        (torch.randn(size, generator=rng) * 3.0**k).to(w.dtype)
        for k, (size, w) in enumerate(zip(sizes, wanted, strict=True))
    ]
    weights[3].zero_()
    emulated.launches = 0
    made, scales, inverses = OwnWeights(torch.device("cpu"), wanted, scalings)(*weights)
    assert emulated.launches == (3 if mixed else 2)
    there = iter(made)
    for w, said, scaling, scale, inverse in zip(weights, wanted, scalings, scales, inverses, strict=True):
        data, right = quantized(w, E4M3, scaling)
        assert inverse.shape == () and inverse == right and scale.reciprocal() == right
        assert inverse.data_ptr() % 16 == inverses[0].data_ptr() % 16
        if said.rows:
            assert torch.equal(codes(next(there)), codes(data))
        if said.turned:
            assert torch.equal(codes(next(there)), codes(quantizers.transpose_by_torch(data)))


@needs_compiler
def test_one_tensor(emulated: FakeDriver) -> None:
    w = torch.randn(32, 16)
    (data,), _, (inverse,) = OwnWeights(torch.device("cpu"), [Weight8(F32, turned=False)], [PLAIN])(w)
    right, wanted = quantized(w, E4M3, PLAIN)
    assert torch.equal(codes(data), codes(right)) and inverse == wanted


@needs_compiler
def test_weights_of_no_numbers(emulated: FakeDriver) -> None:
    _, scales, inverses = OwnWeights(torch.device("cpu"), [Weight8(F32)], [PLAIN])(torch.zeros(0, 16))
    assert [*map(float, (*scales, *inverses))] == [1.0, 1.0]


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-30, 0.3, 1.0, 7.0, 448.0, 3e38, math.inf, math.nan])
def test_by_torch(amax: float) -> None:
    for way in WAYS:
        number = torch.tensor(amax)
        wanted = scale_by(number.clone(), *way)
        scale, inverse = quantizers.scale_by_torch(number, *way)
        assert number == 0.0 and scale == wanted and inverse == wanted.reciprocal()


def test_what_kernels_are_told() -> None:
    assert quantizers.in_kernels(E5M2, WAYS[1][1]) == ScaleOf(57344.0, True, 0.25)

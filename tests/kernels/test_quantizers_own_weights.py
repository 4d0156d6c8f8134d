"""Weights by scales of their own: two launches for all of them, run on the CPU."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import OwnWeights, QuantizeWeights, Weight8, measuring_weights
from te_fuser.ops.blockwise_scaling import Scaling, quantized
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, codes
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

pytestmark = needs_compiler
POWERS = Scaling(power_of_two=True, epsilon=0.25)
B16, F32 = torch.bfloat16, torch.float32


emulated = emulating(lambda: [QuantizeWeights(), *map(measuring_weights, (Scaling(), POWERS))])


@pytest.mark.parametrize("mixed", [False, True])
def test_bytes(emulated: FakeDriver, mixed: bool) -> None:
    """Those of the definition, in the layouts that are wanted; by one launch each where all have one rule."""
    wanted = [Weight8(B16), Weight8(F32, turned=False), Weight8(B16, rows=False), Weight8(B16)]
    scalings = [Scaling(), POWERS if mixed else Scaling(), Scaling(), Scaling()]
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


def test_one_tensor(emulated: FakeDriver) -> None:
    w = torch.randn(32, 16)
    (data,), _, (inverse,) = OwnWeights(torch.device("cpu"), [Weight8(F32, turned=False)], [Scaling()])(w)
    right, wanted = quantized(w, E4M3, Scaling())
    assert torch.equal(codes(data), codes(right)) and inverse == wanted


def test_weights_of_no_numbers(emulated: FakeDriver) -> None:
    _, scales, inverses = OwnWeights(torch.device("cpu"), [Weight8(F32)], [Scaling()])(torch.zeros(0, 16))
    assert [*map(float, (*scales, *inverses))] == [1.0, 1.0]

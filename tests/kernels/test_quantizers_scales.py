"""Scales of largest magnitudes by PyTorch; `tests/codegen/test_maxima.py` has those that kernels make."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from te_fuser.codegen.description import ScaleOf
from te_fuser.kernels import quantizers
from te_fuser.ops.blockwise_scaling import Scaling, scale_by
from tests.float8 import E4M3, E5M2

WAYS = [*itertools.product((E4M3, E5M2), (Scaling(), Scaling(power_of_two=True, epsilon=0.25)))]


@pytest.mark.parametrize("amax", [0.0, 1e-40, 1e-30, 0.3, 1.0, 7.0, 448.0, 3e38, math.inf, math.nan])
def test_by_torch(amax: float) -> None:
    for way in WAYS:
        number = torch.tensor(amax)
        wanted = scale_by(number.clone(), *way)
        scale, inverse = quantizers.scale_by_torch(number, *way)
        assert number == 0.0 and scale == wanted and inverse == wanted.reciprocal()


def test_what_kernels_are_told() -> None:
    assert quantizers.in_kernels(E5M2, WAYS[1][1]) == ScaleOf(57344.0, True, 0.25)

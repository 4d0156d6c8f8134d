"""Scales of largest magnitudes: the kernel run on the CPU, and compiled for the GPUs there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from te_fuser.codegen import nvrtc
from te_fuser.kernels import scale_of_amax
from te_fuser.kernels.scale_of_amax import ScaleOfAmax
from te_fuser.ops.own_scales import Scaling, scale_by
from tests.codegen import ptx
from tests.fake_cuda import FakeDriver, compile_driver, emulate, in_place, in_place_of_written
from tests.float8 import E4M3, E5M2
from tests.needs import needs_compiler, needs_nvrtc

WAYS = [*itertools.product((E4M3, E5M2), (Scaling(), Scaling(power_of_two=True, epsilon=0.25)))]
KERNELS = [ScaleOfAmax.of(*way) for way in WAYS]
AMAXES = [0.0, 1e-40, 1e-30, 0.3, 1.0, 7.0, 448.0, 3e38, math.inf, math.nan]


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeDriver]:
    folder = tmp_path_factory.mktemp("scale_of_amax")
    native = emulate(KERNELS, folder)
    with in_place_of_written(native.__getitem__), in_place(compile_driver()) as driver:
        yield driver


@needs_compiler
@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{str(way[0])[13:]}-{way[1].power_of_two}")
@pytest.mark.parametrize("apart", [1, 4])
def test_scales(emulated: FakeDriver, way: tuple[torch.dtype, Scaling], apart: int) -> None:
    """Those of the definition, their reciprocals, and zeros for who raises the next ones: in one launch."""
    amaxes = torch.tensor(AMAXES * 5)
    wanted, scales, inverses = scale_by(amaxes, *way), torch.empty_like(amaxes), torch.zeros(len(amaxes), apart)
    emulated.launches = 0
    ScaleOfAmax.of(*way).ready(amaxes.device)((amaxes, scales, inverses), 1, 1, 1, (len(amaxes), apart))
    assert emulated.launches == 1 and not amaxes.any()
    assert torch.equal(scales, wanted) and torch.equal(inverses[:, 0], wanted.reciprocal())
    assert not inverses[:, 1:].any()


@pytest.mark.parametrize("amax", AMAXES)
def test_by_torch(amax: float) -> None:
    for way in WAYS:
        number = torch.tensor(amax)
        wanted = scale_by(number.clone(), *way)
        scale, inverse = scale_of_amax.by_torch(number, *way)
        assert number == 0.0 and scale == wanted and inverse == wanted.reciprocal()


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_compiles(arch: str, tmp_path: Path) -> None:
    for kernel in KERNELS:
        compiled = nvrtc.compile_source(kernel.text(), arch, name=kernel.name, cache=tmp_path)
        assert {r.symbol for r in compiled.resources} == {kernel.name}
        assert all(r.spilled_bytes == 0 and r.stack_bytes == 0 for r in compiled.resources)
    assert not ptx.too_early(KERNELS[0].text(), "sm_90a")

"""The kernel that packs gradients in 8 bits in both layouts, run on the CPU by an emulated driver, and compiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_fuser.codegen.cuda_source_kernel import TextKernel
from te_fuser.kernels import quantizers
from te_fuser.kernels.packed_heads import Packing, Parts
from te_fuser.kernels.packed_tiles import PackedTiles, TilePacking, why_not
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.attention.heads import PackedHeads
from te_fuser.ops.blockwise_scaling import quantized
from tests.fake_cuda import FakeDriver
from tests.float8 import BLOCKS, codes
from tests.kernels.emulated import emulating
from tests.kernels.packed_cases import BATCH_FIRST, BF16, BLOCKED, E4M3, E5M2, F16, F32, SIZES, Case, heads, parts_of
from tests.needs import needs_compiler

CASES = [
    Case("packed", heads(24, 24, 64), BF16, parts=True, sums=BF16, stored=E5M2),
    Case("one head in two tiles", heads(2, 1, 128), BF16, parts=True, stored=E5M2, order=(0, 1, 2, 3, 4)),
    Case("groups", heads(6, 2, 24), F16, parts=True, sums=F16, stored=E5M2),
    Case(
        "blocks, sample by sample", heads(6, 2, 16, **BLOCKED, **BATCH_FIRST), BF16, parts=True, sums=F32, stored=E4M3
    ),
    Case("in float32", heads(3, 3, 20, **BLOCKED), F32, parts=True, sums=F32, stored=E5M2, order=(0, 3, 1, 2, 4)),
    Case("in float32, sample by sample", heads(4, 2, 16, **BATCH_FIRST), F32, parts=True, stored=E4M3),
]


IN_BLOCKS = [case for case in CASES if not why_not(case.heads, case.dtype, True)]


def kernel_of(case: Case) -> PackedTiles:
    assert case.stored is not None
    return PackedTiles(case.heads, case.dtype, case.stored, case.sums)


def in_blocks(case: Case) -> PackedTiles:
    return PackedTiles(case.heads, case.dtype, E4M3, case.sums, in_blocks=True)


def every_kernel() -> Iterator[TextKernel[Any]]:
    """Kernels of all cases, and those that store rows alone."""
    for case in CASES:
        yield from (kernel_of(case), case.kernel)
    yield from map(in_blocks, IN_BLOCKS)


emulated = emulating(every_kernel)


def check_bytes(case: Case, packing: TilePacking, samples: int, positions: int, seed: int, device: str) -> None:
    """Bytes equal those of packing rows and then transposing, with and without what is known of strides."""
    parts = parts_of(case, case.inputs(samples, positions, seed)[0].to(device))
    first: list[torch.Tensor | None] = []
    for _ in range(2):
        scaled, other = (case.scaled(torch.device(device)) for _ in range(2))
        assert scaled is not None and other is not None
        rows, turned, sums = packing(parts, scaled, sums=case.sums)
        wanted, totals = Packing(case.heads)(parts, sums=case.sums, scaled=other)
        assert torch.equal(codes(rows), codes(wanted)) and torch.equal(scaled.amax, other.amax)
        assert torch.equal(codes(turned), codes(transpose_by_torch(wanted)))
        assert (sums is None) == (case.sums is None)
        if sums is not None and totals is not None:
            eps, slack = torch.finfo(sums.dtype).eps, 1e-4 if device == "cpu" else 1e-3
            torch.testing.assert_close(sums.float(), totals.float(), rtol=2 * eps, atol=slack)
        first = first or [sums]
        assert sums is None or torch.equal(sums, first[0])  # type: ignore[arg-type]


@needs_compiler
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bytes_of_what_packs_rows_alone(case: Case, emulated: FakeDriver) -> None:
    packing = TilePacking(case.heads)
    for seed, sizes in enumerate((*SIZES, (2, 200), (0, 4), (3, 0))):
        check_bytes(case, packing, *sizes, seed, "cpu")


@needs_compiler
@pytest.mark.parametrize("case", IN_BLOCKS, ids=lambda case: case.name)
def test_blocks(case: Case, emulated: FakeDriver) -> None:
    """Outputs of the kernel that packs equal those of `quantized`, by rows and by columns."""
    packing, features = TilePacking(case.heads), case.heads.features
    for seed, (samples, positions) in enumerate(((2, 66), (3, 43), (0, 4))):
        x = case.inputs(samples, positions, seed)[0]
        parts = parts_of(case, x)
        rows, turned, sums = packing(parts, E4M3, sums=case.sums)
        whole = x.reshape(-1, features)
        for made, given in (
            (quantizers.unpacked(rows, features), whole),
            (quantizers.unpacked(turned, len(whole), turned=True), whole.mT),
        ):
            data, inverse = quantized(given, E4M3, BLOCKS)
            found = made[0].flatten(0, -2)
            assert torch.equal(codes(found)[:, : given.shape[1]], codes(data))
            assert not codes(found)[:, given.shape[1] :].any() and torch.equal(made[1], inverse.mT)
        if sums is not None:
            exact = whole.double().sum(0)
            torch.testing.assert_close(sums.double(), exact, rtol=0.02, atol=0.02 * (1 + len(whole)) ** 0.5)


@needs_compiler
def test_amax_is_raised_and_never_lowered(emulated: FakeDriver) -> None:
    case = CASES[0]
    scaled = case.scaled(torch.device("cpu"))
    assert scaled is not None
    for factor in (1.0, 0.5, 2.0):
        x = case.inputs(3, 33)[0]
        TilePacking(case.heads)(parts_of(case, factor * x), scaled, sums=case.sums)
        torch.testing.assert_close(scaled.amax, max(factor, 1.0) * x.float().abs().max())


@needs_compiler
def test_parts_that_cannot_be_read_as_they_lie_are_copied(emulated: FakeDriver) -> None:
    case = CASES[0]
    q, k, v = parts_of(case, case.inputs(2, 7)[0])
    strange: Parts = (torch.stack((q, q), -1)[..., 0], torch.stack((k, k), -1)[..., 0], v)
    scaled = case.scaled(torch.device("cpu"))
    assert scaled is not None
    packing = TilePacking(case.heads)
    for parts in ((q, k, v), strange, strange):
        rows, turned, _ = packing(parts, scaled, sums=case.sums)
        assert torch.equal(codes(rows), codes(packing((q, k, v), scaled, sums=case.sums)[0]))
        assert torch.equal(codes(turned), codes(transpose_by_torch(rows)))


def test_heads_that_are_no_whole_vectors_are_left() -> None:
    assert why_not(PackedHeads(4, 4, 12), BF16) == "heads of 12 features are no vectors of 8"
    assert not why_not(PackedHeads(4, 4, 12), F32) and not why_not(PackedHeads(4, 4, 24), F16)

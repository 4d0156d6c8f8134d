"""The kernel that packs gradients in 8 bits in both layouts, on a GPU: the bytes of two kernels, and again."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.packed_heads import Packing
from te_fuser.kernels.packed_tiles import TilePacking
from te_fuser.kernels.quantizers import transpose_by_torch
from te_fuser.ops.attention.heads import PackedHeads
from tests.float8 import codes
from tests.kernels.packed_cases import BATCH_FIRST, BF16, BLOCKED, E5M2, Case
from tests.kernels.test_packed_tiles import CASES, parts_of

pytestmark = pytest.mark.gpu
SIZES = [(0, 4), (1, 1), (3, 33), (2, 200), (5, 700)]  # samples, positions
LAYER = PackedHeads(64, 64, 64, **BATCH_FIRST, **BLOCKED)


@pytest.mark.parametrize("case", [*CASES, Case("a layer", LAYER, BF16, parts=True, sums=BF16, stored=E5M2)])
def test_the_bytes_of_what_packs_rows_alone(case: Case) -> None:
    packing, rows_alone = TilePacking(case.heads), Packing(case.heads)
    for seed, (samples, positions) in enumerate(SIZES):
        parts = parts_of(case, case.inputs(samples, positions, seed)[0].cuda())
        scaled, other = (case.scaled(torch.device("cuda")) for _ in range(2))
        assert scaled is not None and other is not None
        rows, turned, sums = packing(parts, scaled, sums=case.sums)
        wanted, totals = rows_alone(parts, sums=case.sums, scaled=other)
        assert torch.equal(codes(rows), codes(wanted)) and torch.equal(scaled.amax, other.amax)
        assert torch.equal(codes(turned), codes(transpose_by_torch(wanted)))
        if sums is not None and totals is not None:
            eps = torch.finfo(sums.dtype).eps
            torch.testing.assert_close(sums.float(), totals.float(), rtol=2 * eps, atol=1e-3)
        _, again, added = packing(parts, scaled, sums=case.sums)
        assert torch.equal(codes(again), codes(turned))
        assert sums is None or (added is not None and torch.equal(sums, added))

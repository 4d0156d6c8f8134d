"""The kernel that packs gradients in 8 bits in both layouts, on a GPU: the bytes of two kernels, and again."""

from __future__ import annotations

import pytest

from te_fuser.kernels.packed_tiles import TilePacking
from te_fuser.ops.attention.heads import PackedHeads
from tests.kernels.packed_cases import BATCH_FIRST, BF16, BLOCKED, E5M2, TILES, Case, check_bytes

SIZES = [(0, 4), (1, 1), (3, 33), (2, 200), (5, 700)]  # samples, positions
LAYER = PackedHeads(64, 64, 64, **BATCH_FIRST, **BLOCKED)


@pytest.mark.parametrize("case", [*TILES, Case("a layer", LAYER, BF16, parts=True, sums=BF16, stored=E5M2)])
def test_the_bytes_of_what_packs_rows_alone(case: Case) -> None:
    packing = TilePacking(case.heads)
    for seed, sizes in enumerate(SIZES):
        check_bytes(case, packing, *sizes, seed, "cuda")

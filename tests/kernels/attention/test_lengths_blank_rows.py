"""Rows that become zeros or NaN: by PyTorch, by the kernel run on the CPU; and compiled for the GPUs there are."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels.attention import lengths
from te_fuser.kernels.attention.lengths import Blanks, Side
from tests.fake_cuda import FakeDriver
from tests.kernels.attention.blanked import CASES, blanked, numbers, rows_for
from tests.kernels.attention.emulated import DTYPES, row_kernels
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

emulated = emulating(row_kernels)


@pytest.mark.parametrize("name", CASES)
def test_by_torch(name: str) -> None:
    x = rows_for(CASES[name], torch.float64)
    want = blanked(x, CASES[name])
    lengths.blank_by_torch(x, CASES[name])
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_by_the_kernel(name: str, dtype: torch.dtype, emulated: FakeDriver) -> None:
    """In one launch."""
    x = rows_for(CASES[name], dtype)
    want = blanked(x, CASES[name])
    emulated.launches = emulated.copies = 0
    lengths.blank_by_kernel(x, CASES[name])
    torch.testing.assert_close(x, want, rtol=0, atol=0, equal_nan=True)
    assert (emulated.launches, emulated.copies) == (1, 0)


@needs_compiler
def test_nothing_to_do(emulated: FakeDriver) -> None:
    emulated.launches = 0
    for x, blanks in (
        (torch.ones(2, 3, 8, dtype=torch.bfloat16), Blanks(Side(3))),
        (torch.ones(0, 3, 8, dtype=torch.bfloat16), Blanks(Side(3, lengths=numbers()))),
    ):
        for way in (lengths.blank_by_kernel, lengths.blank_by_torch):
            way(x, blanks)
            assert (x == 1).all()
    assert emulated.launches == 0


def test_dtypes() -> None:
    assert lengths.why_not_blanked(torch.bfloat16) is None
    assert lengths.why_not_blanked(torch.float32) == (
        "the kernel that blanks rows takes bfloat16, float16, there is torch.float32"
    )

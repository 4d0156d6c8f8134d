"""Matrices of 8 bits turned: by PyTorch, by the kernel run on the CPU; and compiled for the GPUs there are."""

from __future__ import annotations

import pytest
import torch

from te_fuser.kernels import quantizers
from te_fuser.kernels.quantizers import Transposed8
from tests.fake_cuda import FakeDriver
from tests.float8 import E4M3, FORMATS, codes
from tests.kernels.emulated import emulating
from tests.kernels.weights8 import NOTHING, SIZES, bytes_like, turned_wrongly
from tests.needs import needs_compiler

emulated = emulating(lambda: map(Transposed8, FORMATS))


@pytest.mark.parametrize("size", [*SIZES, *NOTHING, (7, 13)])
@pytest.mark.parametrize("dtype", FORMATS)
def test_by_torch(dtype: torch.dtype, size: tuple[int, int]) -> None:
    data = bytes_like(*size, dtype)
    assert not turned_wrongly(data, quantizers.transpose_by_torch(data))


@needs_compiler
@pytest.mark.parametrize("size", SIZES)
def test_by_the_kernel(size: tuple[int, int], emulated: FakeDriver) -> None:
    """In one launch, whatever lies behind the first two dimensions."""
    data = bytes_like(*size, E4M3)
    emulated.launches = 0
    assert not turned_wrongly(data, quantizers.transpose_by_kernel(data))
    assert emulated.launches == 1
    assert torch.equal(codes(quantizers.transpose_by_kernel(data[:, None])), codes(quantizers.transpose_by_torch(data)))


@needs_compiler
def test_what_lies_otherwise_is_copied(emulated: FakeDriver) -> None:
    data = bytes_like(64, 48, E4M3)
    apart = bytes_like(64, 64, E4M3)[:, 16:]
    shifted = torch.zeros(64 * 48 + 3, dtype=torch.uint8)[3:].view(64, 48)
    shifted.copy_(codes(data))
    for given in (apart, shifted.view(E4M3), data.view(torch.uint8).mT.contiguous().view(E4M3).mT):
        wanted = given.view(torch.uint8).clone(memory_format=torch.contiguous_format).view(E4M3)
        assert not turned_wrongly(wanted, quantizers.transpose_by_kernel(given))


@needs_compiler
def test_nothing_is_launched_for_nothing(emulated: FakeDriver) -> None:
    emulated.launches = 0
    for size in NOTHING:
        data = bytes_like(*size, E4M3)
        assert not turned_wrongly(data, quantizers.transpose_by_kernel(data))
    assert emulated.launches == 0


def test_refused_in_words() -> None:
    assert quantizers.why_not_transposed(48) is None
    with pytest.raises(ValueError, match="rows of a multiple of 16, not 40"):
        quantizers.transpose_by_kernel(bytes_like(16, 40, E4M3))

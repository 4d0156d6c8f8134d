"""Amaxes folded by the kernel, run on the CPU by an emulated driver; and compiled for the GPUs there are."""

from __future__ import annotations

import torch

from te_fuser.kernels.quantizers import AmaxFolder, FoldAmaxes, Folded
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.kernels.fold_cases import folded_wrongly
from tests.needs import needs_compiler

pytestmark = needs_compiler
CPU = torch.device("cpu")


emulated = emulating(lambda: [FoldAmaxes()])


def test_values(emulated: FakeDriver) -> None:
    """One launch a fold."""
    emulated.launches = 0
    assert not folded_wrongly(3)
    assert emulated.launches == 3


def test_snapshots_stay_as_they_were(emulated: FakeDriver) -> None:
    product = Folded(torch.zeros(4, 3), torch.ones(3), False, 0, 448.0, 57344.0)
    folder = AmaxFolder({0: product}, 1, CPU)
    counts, slots = torch.zeros(1, 3, dtype=torch.int64), torch.full((1, 3), 2.0)
    first = folder.by_kernel(slots, counts, 1)[..., 0]
    slots.fill_(4.0)
    second = folder.by_kernel(slots, counts, 1)[..., 0]
    scales = torch.tensor([224.0, 224.0, 28672.0])
    assert torch.equal(first[0], torch.cat([scales, 1.0 / scales]))
    assert torch.equal(second[0, :3], torch.tensor([112.0, 112.0, 14336.0]))
    assert torch.equal(product.scale, second[0, :3])


def test_nothing_to_fold(emulated: FakeDriver) -> None:
    """Rows of nobody are counted and cleared; without rows nothing is launched."""
    counts, slots = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[torch.inf, 1.0, torch.nan]] * 2)
    emulated.launches = 0
    assert AmaxFolder({}, 2, CPU).by_kernel(slots, counts, 2).shape == (0, 6, 4)
    assert not slots.any() and counts.tolist() == [[1, 0, 1]] * 2
    assert AmaxFolder({}, 0, CPU).by_kernel(slots, counts, 0).shape == (0, 6, 4) and emulated.launches == 1

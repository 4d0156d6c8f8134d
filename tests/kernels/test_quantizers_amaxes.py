"""Amaxes folded by the kernel, held against the rule in words of PyTorch: here run on the CPU by an emulated driver."""

from __future__ import annotations

import math

import torch

from te_fuser.kernels.quantizers import AmaxFolder, FoldAmaxes, Folded
from tests.fake_cuda import FakeDriver
from tests.kernels.emulated import emulating
from tests.needs import needs_compiler

LARGEST = torch.finfo(torch.float32).max
LENGTHS = (1, 2, 3, 63, 64, 65, 512, 513, 1024, 1537)
SEEN = (0.0, 1.0, 3.7, 448.0, 1e-45, 1e-38, 3e38, math.inf, -math.inf, math.nan, -1.0)
MARGINS = (0, 0, 1, -2, 3, 126, -126)


def products(device: str = "cpu") -> dict[int, Folded]:
    """Of all lengths, both algorithms, several margins and formats, in no order and with rows in between."""
    rng, found = torch.Generator().manual_seed(0), {}
    for k in range(2 * len(LENGTHS)):
        length, newest = LENGTHS[k // 2], k % 2 == 1
        history = torch.rand(length, 3, generator=rng) * 10.0 ** float(k % 7 - 3)
        if k % 5 == 4:
            history[length // 2, k % 3] = math.nan
        scale = torch.rand(3, generator=rng) * 100
        if k % 6 == 3:
            scale[:2] = torch.tensor([math.inf, math.nan])
        backward = 57344.0 if k % 3 else 448.0
        row = (7 * k + 3) % (2 * len(LENGTHS) + 3)
        found[row] = Folded(history.to(device), scale.to(device), newest, MARGINS[k % len(MARGINS)], 448.0, backward)
    return found


def seen_like(rows: int, seed: int, device: str = "cpu") -> torch.Tensor:
    rng = torch.Generator().manual_seed(seed)
    numbers = torch.cat([torch.tensor(SEEN), torch.rand(8, generator=rng)])
    return numbers[torch.randint(len(numbers), (rows, 3), generator=rng)].to(device)


def copied(folded: dict[int, Folded]) -> dict[int, Folded]:
    return {row: p._replace(history=p.history.clone(), scale=p.scale.clone()) for row, p in folded.items()}


def fold_by_rule(product: Folded, seen: torch.Tensor) -> None:
    """One product, one number at a time."""
    for role in range(3):
        amax, history = seen[role], product.history[:, role]
        if not (amax.isfinite() and amax > 0):
            continue
        history.copy_(torch.cat([amax[None], history[:-1]]))
        most = product.backward if role == 2 else product.forward
        largest = history[0] if product.newest else history.amax()
        made = torch.tensor(most, device=seen.device) / largest / 2.0**product.margin
        if largest > 0 and largest <= LARGEST and made > 0:
            product.scale[role] = made
        product.scale[role].clamp_(max=LARGEST)


def bits(t: torch.Tensor) -> torch.Tensor:
    """Numbers to compare; NaN is NaN, whichever."""
    return torch.where(t.isnan(), torch.nan, t).contiguous().view(torch.int32)


def folded_wrongly(folds: int = 3, device: str = "cpu") -> list[str]:
    """Tensors that are wrong after some folds."""
    ours, wrong = products(device), list[str]()
    theirs, rows = copied(ours), max(ours) + 3
    folder = AmaxFolder(ours, rows, torch.device(device))
    counts = torch.zeros(rows + 1, 3, dtype=torch.int64, device=device)
    wanted = counts.clone()
    for k in range(folds):
        seen = seen_like(rows + 1, k, device)
        slots = seen.clone()
        wanted[:rows] += ~seen[:rows].isfinite()
        numbers = folder.by_kernel(slots, counts, rows)[..., 0]
        if not torch.equal(bits(slots[rows]), bits(seen[rows])) or slots[:rows].any():
            wrong.append(f"slots after fold {k}: {slots}")
        for at, (row, product) in enumerate(theirs.items()):
            fold_by_rule(product, seen[row])
            found = numbers[at]
            exact = torch.cat([product.scale, 1.0 / product.scale])
            pairs = {"history": (ours[row].history, product.history), "scale": (ours[row].scale, product.scale)}
            for name, (a, b) in {**pairs, "snapshot": (found, exact)}.items():
                if not torch.equal(bits(a), bits(b)):
                    wrong.append(f"{name} of row {row} after fold {k}: {a} not {b}")
        if any(t.data_ptr() % 16 for t in numbers.flatten().unbind()):
            wrong.append("a number lies at no multiple of 16 bytes")
    if not torch.equal(counts, wanted):
        wrong.append(f"counts {counts.tolist()}, not {wanted.tolist()}")
    return wrong


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

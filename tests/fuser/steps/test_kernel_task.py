"""The hint for huge pages: it names whole pages within the tensor, and only large tensors of the CPU."""

from __future__ import annotations

import pytest
import torch

from te_fuser.fuser.steps import kernel_task

Calls = list[tuple[int, int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []
    monkeypatch.setattr(kernel_task, "_madvise", lambda: lambda *arguments: seen.append(arguments))
    return seen


def test_pages_lie_within_the_tensor(calls: Calls) -> None:
    t = torch.empty(kernel_task.LARGE + 12345, dtype=torch.uint8)
    kernel_task.prefer_huge_pages(t)
    ((start, size, _),) = calls
    assert start % 4096 == 0 and size % 4096 == 0
    assert t.data_ptr() <= start and start + size <= t.data_ptr() + t.nbytes
    assert size > t.nbytes - 2 * 4096


def test_small_and_absent_tensors_are_left_alone(calls: Calls) -> None:
    kernel_task.prefer_huge_pages(torch.empty(kernel_task.LARGE - 1, dtype=torch.uint8))
    kernel_task.prefer_huge_pages(torch.empty(2 * kernel_task.LARGE, dtype=torch.uint8, device="meta"))
    assert not calls


def test_the_system_takes_the_hint() -> None:
    t = torch.empty(kernel_task.LARGE, dtype=torch.uint8)
    kernel_task.prefer_huge_pages(t)
    t[0] = t[-1] = 7
    assert t[0] == t[-1] == 7

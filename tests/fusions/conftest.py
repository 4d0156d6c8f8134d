"""Fixture of the fusions' tests: kernels written by hand that a CPU runs in plans."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from te_fuser.fusions.match import Match
from te_fuser.kernels import decode_attention
from tests.fake_cuda import Emulation, FakeDriver


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, emulation: Emulation) -> Iterator[FakeDriver]:
    """Plans take such kernels, and an emulated driver runs them."""
    monkeypatch.setattr(Match, "why_no_cuda", lambda m: None)
    monkeypatch.setattr(decode_attention, "_room", lambda device, heads: 12)
    with emulation.in_plans():
        yield driver

"""Fixtures of cuBLASLt's products: a library that computes on the CPU, and a GPU that is made up."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_fuser
from tests import fake_cublaslt
from tests.fake_cublaslt import FakeCublasLt, a_new_process
from tests.fake_cuda import FakeDriver


@pytest.fixture
def cublaslt(driver: FakeDriver) -> Iterator[FakeCublasLt]:
    """The library, whose products met no problem yet."""
    with fake_cublaslt.in_place(fake_cublaslt.compile_library()) as fake:
        a_new_process()
        yield fake
    a_new_process()


@pytest.fixture
def a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One by its name, with a cache folder of its own."""
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H200")

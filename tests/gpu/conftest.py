"""Tests of this folder need a GPU; without one they are skipped, and say so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before those of the mark "gpu" are chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("gpu")
            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and -m gpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cache of compiled kernels, one for the tests of a file."""
    return tmp_path_factory.mktemp("cubins")


@pytest.fixture
def narrow_products() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no instructions for products of 8 bits")


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory from torch.empty is full of NaN."""
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3, device="cuda").isnan().all()
    yield
    torch.use_deterministic_algorithms(False)

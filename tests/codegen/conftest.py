"""A folder that tests of a process share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of C++ kernels: those of the corpus are compiled once."""
    return tmp_path_factory.mktemp("kernels")

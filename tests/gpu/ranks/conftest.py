"""Tests of this folder run on RANKS GPUs, one a rank; where there are fewer, ranks share them by gloo."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.parallel.ranks import WORLD, Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The processes, started once for a file."""
    world = int(os.environ.get("RANKS", WORLD))
    processes = Ranks(tmp_path_factory.mktemp("ranks"), request.config.getoption("--cpu"), world=world, gpu=True)
    yield processes
    processes.stop()

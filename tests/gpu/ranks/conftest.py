"""Tests of this folder run on RANKS GPUs, one a rank; where there are fewer, ranks share them by NCCL over sockets."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.parallel.ranks import WORLD, Ranks

RANKS = int(os.environ.get("RANKS", WORLD))


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The processes, started once for a file."""
    folder = tmp_path_factory.mktemp("ranks")
    processes = Ranks(folder, request.config.getoption("--cpu"), world=RANKS, gpu=True)
    yield processes
    processes.stop()

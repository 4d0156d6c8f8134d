"""Fixtures of tests on several ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import WORLD, Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """The processes, started once for a file: two, or as many as its RANKS says."""
    world = getattr(request.module, "RANKS", WORLD)
    processes = Ranks(tmp_path_factory.mktemp("ranks"), request.config.getoption("--cpu"), world=world)
    yield processes
    processes.stop()

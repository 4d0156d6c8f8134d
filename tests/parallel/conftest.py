"""What tests on several ranks share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.parallel.ranks import Ranks


@pytest.fixture(scope="module")
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Two processes, started once for a file."""
    processes = Ranks(tmp_path_factory.mktemp("ranks"), request.config.getoption("--cpu"))
    yield processes
    processes.stop()

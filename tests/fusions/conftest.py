"""What holds for every test of a fusion."""

from __future__ import annotations

import pytest

from te_fuser import fusions


@pytest.fixture(autouse=True)
def registry():
    """Whatever a test registers is gone after it."""
    before = set(fusions.names())
    yield
    for name in set(fusions.names()) - before:
        fusions.unregister(name)
    assert set(fusions.names()) == before

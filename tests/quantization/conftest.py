"""What tests of regions of FP8 share: none leaves amaxes to the next."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from te_fuser.quantization.scale_update import update


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """All that a test recorded is folded behind it."""
    yield
    update()

"""Small segments run as PyTorch's functions, as they do outside of tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from te_fuser import fusions
from te_fuser.fusions import registry


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Segments in here may run as PyTorch's functions, which autograd records."""
    token = registry._disabled.set(registry._disabled.get() - {fusions.RECORDED})
    try:
        yield
    finally:
        registry._disabled.reset(token)

"""Where tests want small segments to run as they do for everybody: as PyTorch's functions."""

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

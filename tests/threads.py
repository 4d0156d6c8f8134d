"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(*bodies: Callable[[], Any]) -> list[Any]:
    """Results of bodies that begin together, in as many new threads; raises what one of them does."""
    start = threading.Barrier(len(bodies), timeout=60)
    with ThreadPoolExecutor(len(bodies), initializer=start.wait) as pool:
        return [body.result() for body in [pool.submit(body) for body in bodies]]

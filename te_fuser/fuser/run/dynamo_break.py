"""The way out of torch.compile's tracing, imported where something is being traced, and nowhere else.

The decorator imports the compiler, which takes as long as importing torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


@torch.compiler.disable(reason="te_fuser plans and fuses by itself; its models are one opaque call")
def outside_tracing(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function where torch.compile does not look."""
    return function(*arguments)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def constant(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that torch.compile cannot follow, of what no call changes."""
    return function(*arguments)

"""Variables of a context, as threads and tasks have each their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Value = TypeVar("Value")
Has = TypeVar("Has")


@contextmanager
def being(variable: ContextVar[Has], value: Value) -> Iterator[Value]:
    """Context in which a variable has a value, which it gives."""
    token = variable.set(value)  # type: ignore[arg-type]
    try:
        yield value
    finally:
        variable.reset(token)

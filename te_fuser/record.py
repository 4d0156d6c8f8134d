"""Records: dataclasses that nobody writes to, made as fast as any object."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from typing_extensions import dataclass_transform  # PyTorch needs it too

Record = TypeVar("Record")


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def record(*, eq: bool = True) -> Callable[[type[Record]], type[Record]]:
    """A dataclass that is frozen for whoever checks types; to make one that is frozen at run time takes much longer.

    `eq`: objects with equal fields are equal, and have one hash; else each is equal to itself alone.
    """
    return dataclass(eq=eq, unsafe_hash=eq)

"""Fusions of options that a test puts together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from te_fuser.fusions import Details, Fusion, fusion

_DETAILS = {field.name for field in dataclasses.fields(Details)}


def declared(**options: Any) -> Callable[[Any], Fusion]:
    """fusion(...) of these options, those of its details among them."""
    details = {name: options.pop(name) for name in _DETAILS & options.keys()}
    return fusion(**options, details=Details(**details))

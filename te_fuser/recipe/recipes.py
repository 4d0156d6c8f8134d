"""Recipes of FP8: formats, and how scales follow from the largest magnitudes seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple


class Largest(NamedTuple):
    """The largest number of the format used in forward, and of that used in backward."""

    fwd: float
    bwd: float


class Format(Enum):
    """Which 8-bit formats are used: E4M3 or E5M2 in both directions, or E4M3 forward and E5M2 backward (HYBRID)."""

    E4M3 = Largest(448.0, 448.0)
    E5M2 = Largest(57344.0, 57344.0)
    HYBRID = Largest(448.0, 57344.0)


class Recipe:
    """What all recipes are."""


@dataclass
class DelayedScaling(Recipe):
    """Scales from the largest magnitudes of earlier calls: scale = largest of the format / amax / 2^margin.

    Attributes:
        margin: powers of two left free.
        interval: not used.
        fp8_format: which formats.
        amax_history_len: how many calls are remembered.
        amax_compute_algo: what becomes of them: "max", "most_recent", or a function of the history, newest first.
        scaling_factor_compute_algo: a function of its own for the scale, or None.
        reduce_amax: whether ranks agree on the largest.
        override_linear_precision: which products keep their precision: forward, gradient of the input, of the weight.
        fp8_dpa, fp8_mha: attention in FP8.
    """

    margin: int = 0
    interval: int = 1
    fp8_format: Format = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[..., Any] = "max"
    scaling_factor_compute_algo: Callable[..., Any] | None = None
    reduce_amax: bool = True
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    fp8_dpa: bool = False
    fp8_mha: bool = False

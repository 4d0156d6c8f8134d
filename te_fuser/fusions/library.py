"""Libraries whose kernels fusions run, as the engine knows them: can they be used, which algorithms are the fastest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from te_fuser.kernels.trials import Contest, Deciding, ModelCall, ReasonNot, Trial


@dataclass(frozen=True)
class Library:
    """A library of kernels; register it, and plans say where it is missing, and `tune` tries its algorithms.

    Attributes:
        name: what it is called; `version` is that of the one at hand.
        kernels: what it gives.
        runs_without: what te_fuser runs how where it is missing, as a warning says it.
        note_without: the same as a plan notes it.
        obstacle: why it cannot be used for a plan on a device at hand, in words; None if it can, or no such plan
            wants it.
        tune: (call, contest, margin, reason_not, deciding) -> what came of other algorithms of what a call of the
            model runs of it; what is taken gains that share of the model's time, runs from now on, and is kept.
    """

    name: str
    kernels: str
    runs_without: str
    note_without: str
    version: Callable[[], int | None]
    obstacle: Callable[[torch.device], str | None]
    tune: Callable[[ModelCall, Contest, float, ReasonNot, Deciding], list[Trial]]


_registered: list[Library] = []


def register_library(library: Library) -> None:
    """Register a library with the engine."""
    _registered.append(library)


def libraries() -> tuple[Library, ...]:
    """All that fusions run on."""
    return tuple(_registered)

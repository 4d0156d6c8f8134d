"""Libraries whose kernels fusions run, as the engine knows them: can they be used, which algorithms are the fastest."""

from __future__ import annotations

from typing import ClassVar

import torch

from te_fuser.kernels.trials import Call, Contest, ReasonNot, Trial


class Library:
    """A library of kernels; register it, and plans say where it is missing, and `tune` tries its algorithms.

    Attributes:
        kernels: what it gives.
        runs_without: what te_fuser runs how where it is missing, as a warning says it.
        note_without: the same as a plan notes it.
    """

    kernels: ClassVar[str]
    runs_without: ClassVar[str]
    note_without: ClassVar[str]

    def problem(self, device: torch.device) -> str | None:
        """Why it cannot be used for a plan on a device at hand, in words; None if it can, or no such plan wants it."""
        raise NotImplementedError

    def tune(self, call: Call, contest: Contest, margin: float, reason_not: ReasonNot) -> list[Trial]:
        """Try other algorithms of what a call runs of it, if anything; what is taken runs from now on, and is kept.

        Args:
            call: the model as it is to be fast.
            margin: the share of the model's time that a choice must gain.
            reason_not: tells wrong algorithms from right ones.
        """
        raise NotImplementedError


_registered: list[Library] = []


def register_library(library: Library) -> None:
    """Let the engine know a library."""
    _registered.append(library)


def libraries() -> tuple[Library, ...]:
    """All that fusions run on."""
    return tuple(_registered)

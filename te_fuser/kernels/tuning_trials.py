"""Trials of tuning: each change by itself in the running model, in the end all that gained against none of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

ModelCall = Callable[[], None]
Contest = Callable[[ModelCall, ModelCall], float]  # seconds of the second over seconds of the first
# reason_not(within) -> why the model cannot run by what is in force inside of `within`; empty when it can. Outside of
# it nothing that is tried is in force: what the model is compared with runs so.
ReasonNot = Callable[[AbstractContextManager[None]], str]


@dataclass(frozen=True)
class Deciding:
    """Decision among several processes that tune one model: without arguments this process decides.

    Attributes:
        first: (what, value) -> the value of the one that decides, as json has it; all give theirs, in the same order.
        writes: whether this one keeps on disk what was chosen.
    """

    first: Callable[[str, Any], Any] = lambda what, value: value
    writes: bool = True


@dataclass(frozen=True)
class Trial:
    """One choice: its time over that of the best plan before it, and what came of it."""

    place: str
    choice: str
    ratio: float | None
    taken: bool
    reason: str = ""


def dropped(trials: Iterable[Trial]) -> list[Trial]:
    """Trials where all that was taken is not faster together: each gain was noise."""
    return [dataclasses.replace(t, taken=False, reason="together not faster") if t.taken else t for t in trials]


def concluded(trials: Sequence[Trial], place: str, contest: Callable[[], float]) -> list[Trial]:
    """The trials and, where one was taken, a last one, `place`."""
    if not any(t.taken for t in trials):
        return list(trials)
    total = contest()
    faster = total < 1
    return [*(trials if faster else dropped(trials)), Trial(place, "all", total, faster)]


def seconds_alone(work: ModelCall) -> float:
    """Seconds of work on PyTorch's current device, by events."""
    times = []
    for _ in range(4):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return min(times[1:])

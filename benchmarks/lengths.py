"""Calls of ever new lengths, from the first on: generation that grows by a token, training on random lengths, memory.

Every round begins with models that have planned nothing; kernels are compiled before, as on any but the first run.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import te_fuser
from benchmarks import models
from te_fuser.fuser.plan import kernel_cache

Call = Callable[[nn.Module, torch.Tensor], object]


@dataclass(frozen=True)
class Course:
    """Calls in a row, each of another length.

    Attributes:
        goal: the largest ratio of te_fuser's time to eager's, for all calls together, that is good enough.
        skipped: how many first calls do not count.
    """

    name: str
    lengths: Callable[[int], Iterable[int]]
    call: Call
    goal: float
    skipped: int = 0


@dataclass(frozen=True)
class Sizes:
    """Of the model and of the courses."""

    layers: int = 12
    hidden: int = 768
    steps: int = 60
    rounds: int = 3
    memory: tuple[int, int] = (100, 1000)  # lengths, after which memory is compared


QUICK = Sizes(layers=2, hidden=128, steps=12, rounds=1, memory=(20, 60))
_FIRST, _LONGEST = 16, 128
_MEMORY_GOAL = 1.02  # beyond noise


def _generate(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        model(x)


def _train(model: nn.Module, x: torch.Tensor) -> None:
    model.zero_grad()
    model(x).square().mean().backward()


COURSES = (
    Course("growing generation", lambda steps: range(_FIRST, _FIRST + steps + 1), _generate, 1.05, skipped=1),
    Course("training of random lengths", lambda steps: _random(steps, _LONGEST), _train, 1.0),
)


def _random(count: int, longest: int) -> list[int]:
    return random.Random(0).choices(range(8, longest + 1), k=count)


def stacked(sizes: Sizes, **options: Any) -> tuple[nn.Module, te_fuser.Sequential]:
    """GPT layers, eager and fused, with the same parameters."""
    pairs = [models.gpt(0.0)(models.POSITIONS, sizes.hidden) for _ in range(sizes.layers)]
    eager, fused = nn.Sequential(*(p.eager for p in pairs)), te_fuser.Sequential(*(p.fused for p in pairs), **options)
    models.copy_parameters(eager, fused)
    return eager, fused


def measured(sizes: Sizes, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry for each course, and one for memory."""
    for course in COURSES:
        found = [run(course, sizes, options) for _ in range(sizes.rounds + 1)][1:]  # the first one compiles
        eager, ours = (statistics.median(times) for times in zip(*found, strict=True))
        ratio = statistics.median(b / a for a, b in found)
        yield _entry(course.name, {"eager": eager, "te_fuser": ours}, ratio, course.goal)
    before, after = memory(sizes, options)
    yield _entry("memory after many lengths", {"few": before, "many": after}, after / before, _MEMORY_GOAL)


def _entry(name: str, measured: dict[str, float], ratio: float, goal: float) -> dict[str, Any]:
    found = {"case": f"lengths: {name}", "family": "lengths", "measured": measured}
    return {**found, "ratio": ratio, "goal": goal, "met": ratio <= goal}


def run(course: Course, sizes: Sizes, options: dict[str, Any]) -> tuple[float, float]:
    """Seconds of all calls of eager and of te_fuser, which take turns."""
    kernel_cache.forget()
    rivals, seconds = stacked(sizes, **options), [0.0, 0.0]
    for number, length in enumerate(course.lengths(sizes.steps)):
        x = torch.randn(1, length, sizes.hidden)
        for k in (0, 1) if number % 2 else (1, 0):
            start = time.perf_counter()
            course.call(rivals[k], x)
            if number >= course.skipped:
                seconds[k] += time.perf_counter() - start
    return seconds[0], seconds[1]


def memory(sizes: Sizes, options: dict[str, Any]) -> tuple[float, float]:
    """MiB of the process after some lengths, and after many more that are no longer."""
    few, many = sizes.memory
    _, model = stacked(Sizes(layers=1, hidden=64), **options)
    order = random.Random(0).sample(range(1, many), many - 1)
    found = []
    for number, length in enumerate([many, *order], 1):
        _train(model, torch.randn(1, length, 64))
        if number in (few, many):
            found.append(_resident())
    return found[0], found[1]


def _resident() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20

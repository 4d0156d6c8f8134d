"""Time that planning takes a core: one GPT layer and a list of them, kernels derived anew and known from before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import te_fuser
from benchmarks import models
from te_fuser.fuser.plan import kernel_cache

DEVICES = ("cpu", "h200")  # planned for by name, whether it is there or not
_GOAL = 2.0  # of all layers, over one


@dataclass(frozen=True)
class Sizes:
    """Of the models; the tokens are so few that a plan for a GPU weighs its host."""

    layers: int = 12
    tokens: int = 64
    hidden: int = 768
    rounds: int = 5


QUICK = Sizes(layers=2, hidden=128, rounds=1)


def measured(sizes: Sizes, options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One entry for each device: ms of the process for a plan, the least of some rounds."""
    for device in DEVICES:
        one, several = (_least(layers, device, sizes, options) for layers in (1, sizes.layers))
        names = [f"{layers} {how} ms" for layers in (1, sizes.layers) for how in ("new", "known")]
        found = {"case": f"planning: {device}", "family": "planning"}
        found["measured"] = dict(zip(names, (*one, *several), strict=True))
        ratio = several[0] / one[0]
        yield {**found, "ratio": ratio, "goal": _GOAL, "met": ratio <= _GOAL}


def _least(layers: int, device: str, sizes: Sizes, options: dict[str, Any]) -> tuple[float, float]:
    with torch.device("meta"):
        parts = [models.gpt(0.0)(sizes.tokens, sizes.hidden).fused for _ in range(layers)]
        model = te_fuser.Sequential(*parts, **options)
        x = torch.empty(1, sizes.tokens, sizes.hidden, requires_grad=True)
    new, known = [], []
    for _ in range(sizes.rounds):
        kernel_cache.forget()
        for times in (new, known):
            start = time.process_time()
            model.plan(x, device=device)
            times.append((time.process_time() - start) * 1e3)
    return min(new), min(known)

"""The part `host`: what a call costs where only the host counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import models
import torch
from gpu_bench import Bench
from gpu_entrants import Entrants
from gpu_entries import OURS, Entry, compared
from gpu_goals import Goal, judged
from gpu_measure import SHORT, contest, no_longer
from models import Rival

import te_fuser

HOST_TOKENS, HOST_HIDDEN = 16, 256


def host(bench: Bench) -> Iterator[Entry]:
    """What a call costs: so few numbers that only the host counts."""
    rows = (("LayerNorm + Linear + GELU + Linear", models.four_ops, 0.55), ("Linear alone", models.linear, 1.0))
    effort = no_longer(bench.effort, SHORT)
    for name, builder, most in rows:
        torch.manual_seed(0)
        pair = bench.build(builder, HOST_TOKENS, HOST_HIDDEN)
        entrants = Entrants.of(bench, pair, torch.bfloat16)
        entrants.add_compiled()
        if bench.card.is_gpu:
            entrants.add(GRAPHED, lambda: _graphed(entrants.ours))  # noqa: B023 - called at once
        for direction in ("forward", "forward+backward"):
            # A graph holds both directions: its forward alone is not what anyone calls.
            steps = {
                n: r.runner(direction) for n, r in entrants.found.items() if n != GRAPHED or "backward" in direction
            }
            entry = compared(f"{name}, {direction}", contest(steps, effort, bench.card)) | entrants.remarks()
            goals = (Goal("over_eager", most),) if direction == "forward+backward" else ()
            yield entry | {"goals": judged(goals, entry)}


GRAPHED = f"{OURS} cuda_graph"


def _graphed(ours: Rival) -> Rival:
    """The model captured as CUDA graphs."""
    graphed: Any = te_fuser.cuda_graph(ours.model, ours.x)
    return replace(ours, model=graphed)

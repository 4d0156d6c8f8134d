"""The part `host`: what a call costs where only the host counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

import te_fuser
from benchmarks import models
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entrants import Entrants
from benchmarks.gpu.contest.entries import OURS, Entry, compared
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import SHORT, contest, no_longer
from benchmarks.models import Rival

HOST_TOKENS, HOST_HIDDEN = 16, 256


def host(bench: Bench) -> Iterator[Entry]:
    """Cost of a call with so few numbers that only the host counts."""
    rows = (("LayerNorm + Linear + GELU + Linear", models.four_ops, 0.55), ("Linear alone", models.linear, 1.0))
    # A processor's clock goes up and down within seconds; blocks in turn then see the same one.
    effort = no_longer(bench.effort, SHORT).in_shorter_blocks(5)
    for name, builder, most in rows:
        torch.manual_seed(0)
        pair = bench.build(builder, HOST_TOKENS, HOST_HIDDEN)
        entrants = Entrants.of(bench, pair, torch.bfloat16)
        entrants.add_compiled()
        if bench.card.is_gpu:
            entrants.add(GRAPHED, lambda: _graphed(entrants.ours))  # noqa: B023 - called at once
        for direction in ("forward", "forward+backward"):
            # A graph holds both directions: its forward alone is not what anyone calls.
            taking_part = {n: r for n, r in entrants.found.items() if n != GRAPHED or "backward" in direction}
            steps = {n: r.runner(direction) for n, r in {"floor": idle(entrants.eager), **taking_part}.items()}
            entry = compared(f"{name}, {direction}", contest(steps, effort, bench.card)) | entrants.remarks()
            goals = (Goal("over_eager", most),) if direction == "forward+backward" else ()
            yield entry | {"goals": judged(goals, entry)}


class _Nothing(torch.autograd.Function):
    """Gives a new tensor like the first one it gets, and new gradients for the others."""

    @staticmethod
    def forward(ctx: Any, y: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        ctx.save_for_backward(*tensors)
        return torch.empty_like(y)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:  # type: ignore[override]
        return None, *map(torch.empty_like, ctx.saved_tensors)


_apply = super(torch.autograd.Function, _Nothing).apply  # as te_fuser calls its own


class _Idle(torch.nn.Module):
    """A model of the same parameters that is one autograd node and computes nothing."""

    def __init__(self, model: torch.nn.Module, y: torch.Tensor) -> None:
        super().__init__()
        self.tensors, self.y = tuple(model.parameters()), y

    def forward(self, x: torch.Tensor) -> Any:
        return _apply(self.y, x, *self.tensors)


def idle(eager: Rival) -> Rival:
    """Least cost of a call that goes through one autograd node written in Python."""
    return replace(eager, model=_Idle(eager.model, eager.forward()))


GRAPHED = f"{OURS} cuda_graph"


def _graphed(ours: Rival) -> Rival:
    """The model captured as CUDA graphs."""
    graphed: Any = te_fuser.cuda_graph(ours.model, ours.x)
    return replace(ours, model=graphed)

"""The parts `small` and `decoding`: calls so small that the host decides, or has a say."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

import te_fuser
from benchmarks import models
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entrants import Entrants
from benchmarks.gpu.contest.entries import OURS, Entry, compared
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import SHORT, contest, no_longer
from benchmarks.gpu.parts.host import HOST_HIDDEN, HOST_TOKENS
from benchmarks.models import Builder, Rival

GRAPHED, REDUCED = f"{OURS} cuda_graph", "torch.compile reduce-overhead"
DECODING_LAYERS = 4
BOTH, FORWARD = "forward+backward", "forward"
# Direction -> the most of eager's time.
Bounds = Mapping[str, float]


def small(bench: Bench) -> Iterator[Entry]:
    """A Linear, four ops, and layers of a few tokens, of a narrow layer many; forward also under no_grad."""
    scale, attention = bench.scale, bench.scale.attention(0.1)
    layer = models.gpt(0.1, attention)
    rows: list[tuple[str, Builder, int, int, Bounds]] = [
        ("Linear alone", models.linear, HOST_TOKENS, HOST_HIDDEN, {BOTH: 1.05}),
        ("LayerNorm + Linear + GELU + Linear", models.four_ops, HOST_TOKENS, HOST_HIDDEN, {BOTH: 0.85, FORWARD: 0.8}),
    ]
    for number, tokens in enumerate(scale.small_tokens):
        goals = {BOTH: 1.0} if number else {FORWARD: 0.8}
        rows.append((f"seed layer, {tokens} x {scale.hidden}", layer, tokens, scale.hidden, goals))
    narrow = f"seed layer, {scale.tokens} x {scale.narrow}"
    rows.append((narrow, layer, scale.tokens, scale.narrow, {BOTH: 0.9}))
    for name, builder, tokens, hidden, bounds in rows:
        yield from _both_directions(bench, name, builder, tokens, hidden, bounds)
        forget()


def _both_directions(
    bench: Bench, name: str, builder: Builder, tokens: int, hidden: int, bounds: Bounds
) -> Iterator[Entry]:
    torch.manual_seed(0)
    entrants = Entrants.of(bench, bench.build(builder, tokens, hidden), torch.bfloat16)
    entrants.add_compiled()
    for direction in (FORWARD, BOTH):
        yield _entry(bench, entrants, f"{name}, {direction}", direction, bounds.get(direction))


def _entry(bench: Bench, entrants: Entrants, case: str, direction: str, most: float | None) -> Entry:
    effort = no_longer(bench.effort, SHORT).in_shorter_blocks(5)
    steps = {name: rival.runner(direction) for name, rival in entrants.found.items()}
    entry = compared(case, contest(steps, effort, bench.card)) | entrants.remarks()
    return entry | {"goals": judged(() if most is None else (Goal("over_eager", most),), entry)}


def decoding(bench: Bench) -> Iterator[Entry]:
    """One step of decoding: a few rows through some layers, each row a sample of its own, under no_grad."""
    attention = replace(bench.scale.attention(), positions=1)
    for rows in bench.scale.decoding_rows:
        torch.manual_seed(0)
        layers = [bench.build(models.gpt(0.0, attention), rows, bench.scale.hidden) for _ in range(DECODING_LAYERS)]
        eager = torch.nn.Sequential(*(p.eager for p in layers))
        fused = te_fuser.Sequential(*(p.fused for p in layers), **bench.options)
        entrants = Entrants.of(bench, models.Pair(eager, fused, layers[0].shape), torch.bfloat16)
        entrants.add_compiled(FORWARD)
        entrants.add_compiled(FORWARD, REDUCED, mode="reduce-overhead")
        if bench.card.is_gpu:
            entrants.add(GRAPHED, lambda: _graphed(entrants.ours), FORWARD)  # noqa: B023 - called at once
        yield _entry(bench, entrants, f"decoding, {rows} rows, {DECODING_LAYERS} layers", FORWARD, None)
        forget()


@torch.no_grad()
def _graphed(ours: Rival) -> Rival:
    """The model's forward captured as a CUDA graph."""
    graphed: Any = te_fuser.cuda_graph(ours.model, ours.x.detach())
    return replace(ours, model=graphed, x=ours.x.detach())

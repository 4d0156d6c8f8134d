"""The part `train`: minutes of training layers that ranks share; whether they hang, and whether memory grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

import te_fuser
from benchmarks.gpu.contest.entries import MIB, OURS, Entry
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.several.layer import our_layer
from benchmarks.gpu.several.ranks import Ranks

STEPS_AT_ONCE = 20  # between two looks at the clock, which ranks agree on
RATE = 1e-5


def train(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """Steps of AdamW on random batches, tensor and sequence parallel: their number, the loss, what memory grew by."""
    sizes = ranks.sizes
    layers = te_fuser.Sequential(*(our_layer(ranks) for _ in range(sizes.layers)))
    model = te_fuser.parallelize(layers, ranks.mesh(), sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    steps, start, used, losses = 0, time.perf_counter(), list[int](), list[float]()
    while not losses or ranks.largest(time.perf_counter() - start) < sizes.train_seconds:
        for _ in range(STEPS_AT_ONCE):
            x = ranks.own(ranks.random(f"{steps}", sizes.positions, sizes.batch, sizes.hidden))
            optimizer.zero_grad()
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            steps += 1
        losses.append(loss.item())
        used.append(torch.cuda.memory_allocated(ranks.device) if ranks.card.is_gpu else 0)
    seconds = time.perf_counter() - start
    found = {"ms": 1e3 * seconds / steps, "range_ms": [1e3 * seconds / steps] * 2, "steps": steps, "losses": losses}
    entry: Entry = {
        "case": f"{sizes.layers} seed layers on {ranks.size} ranks, AdamW, {seconds:.0f} s",
        "contenders": {OURS: {**found, "grown_mib": (used[-1] - used[0]) / MIB}},
    }
    yield {**entry, "goals": judged((Goal("grown_mib", 0.0),), entry)}

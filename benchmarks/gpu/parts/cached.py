"""The part `cached`: a token behind others whose keys and values are kept, through some layers, as a CUDA graph too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import torch

import te_fuser
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import OURS, Entry, attempt, compared
from benchmarks.gpu.contest.goals import judged, over_floor
from benchmarks.gpu.contest.measure import SHORT, Step, contest, no_longer
from benchmarks.gpu.parts.glue import copying
from benchmarks.gpu.parts.small import DECODING_LAYERS, GRAPHED

_SEQUENCES = (1, 8)
_HEAD = 128  # features


def cached(bench: Bench) -> Iterator[Entry]:
    """Of one sequence and of several; the floor is a copy that moves as many bytes as weights and caches have."""
    for sequences in _SEQUENCES:
        yield _entry(bench, sequences)
        forget()


@torch.no_grad()
def _entry(bench: Bench, sequences: int) -> Entry:
    torch.manual_seed(0)
    step, moved = _decoding(bench, sequences)
    steps = {"floor": copying(moved, bench.device), OURS: step}
    entry: Entry = {}
    if bench.card.is_gpu:
        attempt(entry, GRAPHED, lambda: steps.update({GRAPHED: _captured(step)}))
    results = contest(steps, no_longer(bench.effort, SHORT).in_shorter_blocks(5), bench.card)
    case = f"a token behind {bench.scale.positions}, {sequences} sequences, {DECODING_LAYERS} layers"
    entry |= compared(case, results)
    return entry | {"goals": judged((over_floor(1.25, GRAPHED),), entry)}


def _decoding(bench: Bench, sequences: int) -> tuple[Step, int]:
    """The step at the last position of full caches, again and again, and the bytes of weights and caches."""
    hidden, positions = bench.scale.hidden, bench.scale.positions
    with bench.device:
        layers = [
            te_fuser.TransformerLayer(
                hidden,
                4 * hidden,
                max(hidden // _HEAD, 1),
                layer_number=n + 1,
                params_dtype=torch.bfloat16,
                **bench.options,
            ).eval()
            for n in range(DECODING_LAYERS)
        ]
        prompt = torch.randn(positions - 1, sequences, hidden, dtype=torch.bfloat16)
    params = te_fuser.InferenceParams(sequences, positions)

    def run(x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = layer(x, inference_params=params)
        return x

    for tokens in (prompt, prompt[:1]):
        params.pre_step(OrderedDict.fromkeys(range(sequences), len(tokens)))
        run(tokens)
    weights = sum(p.numel() * p.element_size() for layer in layers for p in layer.parameters())
    caches = 2 * DECODING_LAYERS * positions * sequences * hidden * prompt.element_size()
    last = prompt[:1].clone()
    return lambda: run(last), weights + caches


def _captured(step: Step) -> Step:
    """The step as a CUDA graph."""
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay

"""The part `timeline`: what runs on a GPU in a step of the shared layer, with exchanges by NCCL and by copy engines."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contest.entries import Entry
from benchmarks.gpu.contest.measure import kind_of
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.layer import ours, ours_without
from benchmarks.gpu.several.ranks import Ranks
from te_fuser import fusions

STEPS = 3  # of which the second is shown: the first waits for the host, the last ends alone
NCCL, COPIES = "NCCL", "copy engines"
EXCHANGE = "exchange"  # the kind of a collective's kernel and of a copy from one GPU to another


def timeline(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """One entry: for each way the events of this rank's GPU, (begin, microseconds, kind, name), in their order."""
    found: dict[str, dict[str, Any]] = {}
    with rivals.attending():
        for name, made in {
            NCCL: ours_without(ranks, [fusions.PEER_COPIES]),
            COPIES: ours(ranks),
        }.items():
            for _ in range(2 * STEPS):
                made.step()
            events = _events(made.step, ranks)
            found[name] = {"events": shown(events)} if events else {}
    yield {"case": f"a step of the seed layer on rank 0 of {ranks.size}", "contenders": found}


def _events(step: Callable[[], object], ranks: Ranks) -> list[Mapping[str, Any]]:
    """Events that the profiler saw in the second of a few steps; nothing on CPUs."""
    ranks.card.synchronize()
    ranks.largest(0.0)
    if not ranks.card.is_gpu:
        return []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(STEPS):
            step()
        ranks.card.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profile.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    on_gpu = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy")]
    on_gpu.sort(key=lambda e: e["ts"])
    count = len(on_gpu) // STEPS
    return on_gpu[count : 2 * count]


def shown(events: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, str, str]]:
    """Events of a step, from its first one on, in microseconds."""
    begin = events[0]["ts"]
    return [(round(e["ts"] - begin, 1), round(e["dur"], 1), _kind(e["name"]), e["name"][:48]) for e in events]


def _kind(name: str) -> str:
    if name.startswith(("ncclDevKernel", "Memcpy PtoP")):
        return EXCHANGE
    return "copy" if name.startswith("Memcpy") else kind_of(name.lower())

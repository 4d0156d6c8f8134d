"""The part `presets`: a preset beside the bare list of its ops: time, memory, what a small call costs the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import OURS, Entry, attempt, compared, memory_of
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import SHORT, contest, no_longer
from benchmarks.gpu.parts.host import HOST_HIDDEN, HOST_TOKENS
from benchmarks.models import Rival
from benchmarks.presets import TWINS, Twins

LIST = f"{OURS} list"
_GOALS = (Goal("over_list", 1.01), Goal("peak_over_list", 1.01))
_HOST_GOALS = (Goal("us_over_list", 10.0),)


def _build(bench: Bench, twins: Twins, tokens: int, hidden: int) -> dict[str, Rival]:
    with bench.device:
        return twins.build(tokens, hidden, torch.bfloat16, bench.options, (LIST, OURS))


def presets(bench: Bench) -> Iterator[Entry]:
    """Each preset at the size of a layer, then where only the host counts."""
    scale = bench.scale
    for twins in TWINS:
        yield _large(bench, twins, scale.tokens, scale.hidden)
        forget()
    for twins in TWINS:
        yield _small(bench, twins)


def _large(bench: Bench, twins: Twins, tokens: int, hidden: int) -> Entry:
    torch.manual_seed(0)
    found = _build(bench, twins, tokens, hidden)
    results = contest({name: r.forward_and_backward for name, r in found.items()}, bench.effort, bench.card)
    entry = compared(f"{twins.name}, {tokens} x {hidden}", results)
    ours = entry["contenders"][OURS]
    ours["over_list"] = results[OURS].over(results[LIST])

    def add_memory() -> None:
        for name, rival in found.items():
            entry["contenders"][name] |= memory_of(rival, bench.card)
        peak = entry["contenders"][LIST].get("peak_mib")
        if peak:
            ours["peak_over_list"] = ours["peak_mib"] / peak

    attempt(entry, "memory", add_memory)
    return entry | {"goals": judged(_GOALS, entry)}


def _small(bench: Bench, twins: Twins) -> Entry:
    torch.manual_seed(0)
    found = _build(bench, twins, HOST_TOKENS, HOST_HIDDEN)
    # As in the part `host`: a processor's clock goes up and down within seconds.
    effort = no_longer(bench.effort, SHORT).in_shorter_blocks(5)
    results = contest({name: r.forward_and_backward for name, r in found.items()}, effort, bench.card)
    entry = compared(f"{twins.name}, {HOST_TOKENS} x {HOST_HIDDEN}", results)
    entry["contenders"][OURS]["us_over_list"] = 1e6 * (results[OURS].seconds - results[LIST].seconds)
    return entry | {"goals": judged(_HOST_GOALS, entry)}

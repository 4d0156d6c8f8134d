"""The part `presets`: a preset beside the bare list of its ops: time, memory, what a small call costs the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import te_fuser
from benchmarks.gpu.contest.bench import Bench, forget
from benchmarks.gpu.contest.entries import OURS, Entry, attempt, compared, memory_of
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import SHORT, contest, no_longer
from benchmarks.gpu.parts.host import HOST_HIDDEN, HOST_TOKENS
from benchmarks.models import Rival, check_alike
from te_fuser import ops

LIST = f"{OURS} list"
APART = ("query", "key", "value")
_GOALS = (Goal("over_list", 1.01), Goal("peak_over_list", 1.01))
_HOST_GOALS = (Goal("us_over_list", 10.0),)


@dataclass(frozen=True)
class Twins:
    """A preset, and the ops of its list with parameters of their own, for a hidden size and options of lists."""

    name: str
    preset: Callable[..., torch.nn.Module]
    bare: Callable[[int], list[ops.FusableOperation]]

    def build(self, bench: Bench, tokens: int, hidden: int) -> dict[str, Rival]:
        """Both with the same parameters and the same inputs.

        Raises:
            RuntimeError: when they differ.
        """
        with bench.device:
            preset = self.preset(hidden, **bench.options).to(torch.bfloat16)
            bare = te_fuser.Sequential(*self.bare(hidden), **bench.options).to(torch.bfloat16)
            x = torch.randn(tokens, hidden, dtype=torch.bfloat16).requires_grad_()
        with torch.no_grad():
            for ours, parts in zip(bare.parameters(), _joined(preset), strict=True):
                ours.copy_(torch.cat(parts))
        call = Rival(bare, x, {}, torch.randn_like(bare(x)))
        found = {LIST: call.like(bare), OURS: call.like(preset)}
        check_alike(*found.values())
        return found


def _joined(preset: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The parameters, those that are parts of one together."""
    parts: dict[str, list[torch.Tensor]] = {}
    for name, parameter in preset.named_parameters():
        part, _, kind = name.rpartition("_")
        parts.setdefault(kind if part in APART else name, []).append(parameter.detach())
    yield from parts.values()


def _mlp(hidden: int, **options: Any) -> torch.nn.Module:
    return te_fuser.LayerNormMLP(hidden, 4 * hidden, **options)


def _projection(hidden: int, **options: Any) -> torch.nn.Module:
    return te_fuser.LayerNormLinear(hidden, 3 * hidden, **options)


def _projection_apart(hidden: int, **options: Any) -> torch.nn.Module:
    return te_fuser.LayerNormLinear(hidden, 3 * hidden, parameters_split=APART, **options)


def _mlp_ops(hidden: int) -> list[ops.FusableOperation]:
    return [ops.LayerNorm(hidden), ops.Linear(hidden, 4 * hidden), ops.GELU(), ops.Linear(4 * hidden, hidden)]


def _projection_ops(hidden: int) -> list[ops.FusableOperation]:
    return [ops.LayerNorm(hidden), ops.Linear(hidden, 3 * hidden)]


TWINS = (
    Twins("LayerNormMLP", _mlp, _mlp_ops),
    Twins("LayerNormLinear", _projection, _projection_ops),
    Twins("LayerNormLinear, q, k and v apart", _projection_apart, _projection_ops),
)


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
    found = twins.build(bench, tokens, hidden)
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
    found = twins.build(bench, HOST_TOKENS, HOST_HIDDEN)
    # As in the part `host`: a processor's clock goes up and down within seconds.
    effort = no_longer(bench.effort, SHORT).in_shorter_blocks(5)
    results = contest({name: r.forward_and_backward for name, r in found.items()}, effort, bench.card)
    entry = compared(f"{twins.name}, {HOST_TOKENS} x {HOST_HIDDEN}", results)
    entry["contenders"][OURS]["us_over_list"] = 1e6 * (results[OURS].seconds - results[LIST].seconds)
    return entry | {"goals": judged(_HOST_GOALS, entry)}

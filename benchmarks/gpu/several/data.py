"""The part `data`: layers with a batch a rank, by DistributedDataParallel and by fully_shard, beside one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import te_fuser
from benchmarks.gpu.contest.entries import OURS, Entry
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.several import rivals
from benchmarks.gpu.several.layer import Entrant, alone, our_layer
from benchmarks.gpu.several.ranks import Ranks, contest

ALONE, DDP, FSDP = "alone", "DDP", "FSDP2"
# Ranks -> the least efficiency of DDP, of FSDP2.
GOALS = {2: (0.945, 0.93), 4: (0.925, 0.90)}
MOST_OF_EAGER = 0.95


def _eager(ranks: Ranks) -> nn.Module:
    return nn.Sequential(*(rivals.layer(ranks) for _ in range(ranks.sizes.layers)))


def _ours(ranks: Ranks) -> nn.Module:
    layers = [our_layer(ranks) for _ in range(ranks.sizes.layers)]
    return te_fuser.Sequential(*layers, **({"fallback": "error"} if ranks.card.is_gpu else {}))


def _wrapped(ranks: Ranks, model: Any, wrapper: str) -> nn.Module:
    if wrapper == DDP:
        own = [ranks.device.index] if ranks.card.is_gpu else None
        return DistributedDataParallel(model, own, gradient_as_bucket_view=True)
    if wrapper == FSDP:
        mesh = ranks.mesh()
        for layer in model:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)  # type: ignore[no-any-return]
    return model  # type: ignore[no-any-return]


def data(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """One entry: each model in each wrapper. Efficiency is a rank's time alone over that with the others."""
    found: dict[str, Entrant] = {}
    left_out = {}
    with rivals.attending():
        for who, make in (("eager", _eager), (OURS, _ours)):
            for wrapper in (ALONE, DDP, FSDP):
                name = f"{who} {wrapper}"
                say(preparing=name)
                made, reason = ranks.all_can(
                    lambda make=make, how=wrapper: _tried(ranks, _wrapped(ranks, make(ranks), how))
                )
                if reason:
                    left_out[name] = reason
                else:
                    found[name] = made
        times = contest({name: made.step for name, made in found.items()}, ranks)
    contenders = {name: result.as_data() for name, result in times.items()}
    for name, result in times.items():
        who, _, wrapper = name.rpartition(" ")
        if wrapper != ALONE and f"{who} {ALONE}" in times:
            contenders[name]["efficiency"] = 1 / result.over(times[f"{who} {ALONE}"])
        if who == OURS and f"eager {wrapper}" in times:
            contenders[name]["over_eager"] = result.over(times[f"eager {wrapper}"])
    goals = [Goal("over_eager", MOST_OF_EAGER, f"{OURS} {wrapper}") for wrapper in (DDP, FSDP)]
    for wrapper, least in zip((DDP, FSDP), GOALS.get(ranks.size, ()), strict=False):
        goals.append(Goal("efficiency", least, f"{OURS} {wrapper}", at_least=True))
    case = f"{ranks.sizes.layers} seed layers bf16 dropout 0, {ranks.sizes.tokens} tokens a rank"
    entry: Entry = {"case": case, "contenders": contenders, "left_out": left_out}
    yield {**entry, "goals": judged(goals, entry)}


def _tried(ranks: Ranks, model: nn.Module) -> Entrant:
    made = alone(ranks, model)
    for _ in range(2):  # DDP orders its buckets by the first
        made.step()
    return made

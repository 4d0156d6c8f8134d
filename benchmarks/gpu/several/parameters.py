"""The part `parameters`: what a DTensor as parameter takes of the host, beside a plain one."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

import te_fuser
from benchmarks.gpu.contest.entries import OURS, Entry
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import Effort, no_longer
from benchmarks.gpu.several.layer import Entrant
from benchmarks.gpu.several.ranks import Ranks, contest
from te_fuser import ops

SHORT = Effort(15, 0.1, 0.5)
FEATURES, ROWS = 16, 4
MOST = 20.0  # microseconds, forward and backward
PLAIN = f"{OURS} plain"


def parameters(ranks: Ranks, say: Callable[..., None], without: object = ()) -> Iterator[Entry]:
    """A list of biases, which ranks have whole: nothing is sent, so that the host alone is measured."""
    count = ranks.sizes.parameters
    models = {}
    for name in (PLAIN, OURS):
        with ranks.device:
            models[name] = te_fuser.Sequential(*(ops.Bias(FEATURES) for _ in range(count)))
    te_fuser.parallelize(models[OURS], ranks.mesh())
    x, dy = ranks.random("x", ROWS, FEATURES).float(), ranks.random("dy", ROWS, FEATURES).float()
    steps = {n: Entrant(m, m, x.clone().requires_grad_(), dy, ()).step for n, m in models.items()}
    times = contest(steps, ranks, no_longer(ranks.effort, SHORT))
    contenders = {name: result.as_data() for name, result in times.items()}
    rounds = zip(times[OURS].blocks, times[PLAIN].blocks, strict=True)
    apart = torch.tensor([a.seconds - b.seconds for a, b in rounds]).median().item()
    contenders[OURS]["us_a_parameter"] = 1e6 * apart / count
    entry: Entry = {"case": f"{count} biases as DTensors", "contenders": contenders}
    yield {**entry, "goals": judged((Goal("us_a_parameter", MOST),), entry)}

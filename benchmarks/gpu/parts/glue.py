"""The part `glue`: what stands between products, each contender a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks import models
from benchmarks.gpu.contest.bench import Bench, Scale, forget
from benchmarks.gpu.contest.entrants import Entrants
from benchmarks.gpu.contest.entries import MIB, OURS, Entry, attempt, compared, why
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.contest.measure import SHORT, Card, Effort, Result, Step, contest, no_longer, traced
from benchmarks.models import Builder, Rival


@dataclass(frozen=True)
class Stretch:
    """Ops between products.

    Attributes:
        units: tensors of [tokens, hidden] that must be moved at the least, forward and forward + backward.
        goals: of forward, and of forward + backward, on an H200.
    """

    name: str
    builder: Builder
    tokens: int
    hidden: int
    units: tuple[int, int]
    goals: tuple[Goal | None, Goal | None] = (None, None)


def at_least(gbps: float) -> tuple[None, Goal]:
    """The goal of a stretch forward and backward."""
    return None, Goal("gbps", gbps, at_least=True)


_NORM_GOALS = Goal("ms", 0.075), Goal("ms", 0.19)


def stretches(scale: Scale) -> tuple[Stretch, ...]:
    """Stretches of a layer."""
    t, h = scale.tokens, scale.hidden
    return (
        Stretch("LayerNorm", models.layer_norm, scale.norms, h, (2, 5), at_least(3800)),
        Stretch("RMSNorm", models.rms_norm, scale.norms, h, (2, 5), at_least(3900)),
        Stretch("bias + GELU", models.bias_gelu, t, 4 * h, (2, 5), at_least(3800)),
        Stretch("SwiGLU", models.swiglu, t, models.gated_features(h), (3, 8), at_least(4100)),
        # The gradient of the residual is the incoming one: nothing is moved for it.
        Stretch("bias + dropout + add", models.bias_dropout_add, scale.norms, h, (3, 5), at_least(3800)),
        Stretch("bias + dropout + add + LayerNorm", models.bias_dropout_add_norm, t, h, (4, 9), _NORM_GOALS),
    )


SETS = 3  # inputs that take turns, so that no call finds its own in the cache


def glue(bench: Bench) -> Iterator[Entry]:
    """Stretches between products; each contender is a CUDA graph, so that the host does not count."""
    effort = no_longer(bench.effort, SHORT)
    for stretch in stretches(bench.scale):
        torch.manual_seed(0)
        pair = bench.build(stretch.builder, stretch.tokens, stretch.hidden)
        entrants = Entrants.of(bench, pair, torch.bfloat16)
        entrants.add_compiled()
        entrants.add_libraries(stretch.name, stretch.hidden)
        for k, direction in enumerate(("forward", "forward+backward")):
            yield _glue_entry(bench, effort, stretch, entrants, direction, k)
        forget()


def _glue_entry(bench: Bench, effort: Effort, stretch: Stretch, entrants: Entrants, direction: str, k: int) -> Entry:
    moved = stretch.units[k] * stretch.tokens * stretch.hidden * torch.bfloat16.itemsize
    sets = [entrants.eager.again() for _ in range(SETS)]
    steps = {"copy": recorded([copying(moved, bench.device) for _ in range(SETS)], bench.card)}
    left_out = dict(entrants.left_out)
    for name, rival in entrants.found.items():
        try:
            steps[name] = recorded([_pure(inputs.like(rival.model), direction) for inputs in sets], bench.card)
        except Exception as error:
            if name in ("eager", OURS):
                raise
            left_out[name] = why(error)
    results = {name: scaled(result, 1 / SETS) for name, result in contest(steps, effort, bench.card).items()}
    entry = compared(stretch.name if direction == "forward+backward" else f"{stretch.name}, forward", results)
    entry |= {"tokens": stretch.tokens, "hidden": stretch.hidden, "moved_mib": moved / MIB}
    for data in entry["contenders"].values():
        data |= {"gbps": moved / data["ms"] / 1e6, "of_copy": 1 / data["over_floor"]}
    if left_out:
        entry["left_out"] = left_out
    attempt(entry, "kernels", lambda: _add_count(entry, steps[OURS], bench.card))
    goal = stretch.goals[k]
    entry["goals"] = judged((goal,) if goal else (), entry)
    return entry


def _add_count(entry: Entry, step: Step, card: Card) -> None:
    trace = traced(step, card)
    if trace:
        entry["contenders"][OURS]["kernels"] = trace.kernels / SETS


# Elements between the buffers of a copy. Of six sizes one copied at two thirds of the others' speed, that of buffers
# exactly 640 MiB apart; with this between them none lie a round number apart.
_APART = 5 << 18


def copying(moved: int, device: torch.device) -> Step:
    """A copy that moves so many bytes: it reads half of them, and writes the other half."""
    count = moved // 8
    source, target = (torch.randn(count + _APART, device=device)[:count] for _ in range(2))
    return lambda: target.copy_(source)


def _pure(rival: Rival, direction: str) -> Step:
    """A call that leaves nothing behind, so that it can be recorded."""
    if direction == "forward":
        return rival.forward
    return lambda: torch.autograd.grad(rival.model(rival.x, **rival.named), rival.leaves, rival.dy)


def recorded(calls: Sequence[Step], card: Card) -> Step:
    """The calls as one CUDA graph; without a GPU just one after the other."""

    def run() -> None:
        for call in calls:
            call()

    if not card.is_gpu:
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    # The outer context is for a capture that fails: it would leave its own stream as the current one.
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
        run()

    def replay(keep: object = calls) -> None:  # the graph has addresses only: the tensors must outlive it
        graph.replay()

    return replay


def scaled(result: Result, by: float) -> Result:
    """A result for a part of what was called."""
    return Result(
        tuple(
            replace(b, seconds=b.seconds * by, joules=None if b.joules is None else b.joules * by)
            for b in result.blocks
        )
    )

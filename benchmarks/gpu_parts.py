"""The benchmark's parts: what competes in each of them. A part gives entries, one for each of its cases.

An entry: {"case": name, "contenders": {name: numbers}, ...}. Contenders whose names begin with "te_fuser" are ours,
"floor" and "copy" are what nobody can beat, the others are rivals. An entry may also have "goals" (what was to be
reached, and whether it was) and "left_out" (contenders that could not take part, and why).
"""

from __future__ import annotations

import csv
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_goals
import gpu_rivals
import models
import torch
from common import ROOT
from gpu_floor import Work, gated_work, layer_work, linear_residual_work, make_floor, mlp_work
from gpu_goals import AHEAD, Goal, judged, over_floor
from gpu_measure import SHORT, Card, Effort, Result, Step, contest, kept_bytes, no_longer, peak_bytes, traced
from models import Attention, Builder, Rival, copy_parameters, rivals

import te_fuser

Entry = dict[str, Any]
OURS = "te_fuser"
BOUNDS = ("floor", "copy")
MIB = 2.0**20
_SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


@dataclass(frozen=True)
class Scale:
    """The sizes of everything.

    Attributes:
        tokens, hidden, positions: of a layer; the attention's heads have 128 features.
        norms: tokens of the norms and of bias + dropout + add alone; the other stretches have `tokens`.
        growing_tokens, growing_hidden: what the part `growth` goes through.
        train: arguments of the training example; it takes `train_steps`, and `exact_steps` where no dropout draws.
    """

    tokens: int = 8192
    hidden: int = 4096
    positions: int = 2048
    norms: int = 16384
    growing_tokens: tuple[int, ...] = tuple(1024 << k for k in range(7))
    growing_hidden: tuple[int, ...] = (1024, 2048, 4096, 8192)
    train: tuple[str, ...] = ("--size", "large")
    train_steps: int = 1000
    exact_steps: int = 300

    def attention(self, dropout: float = 0.0, **options: Any) -> Attention:
        """A layer's."""
        return Attention(128, self.positions, dropout=dropout, **options)


TOY = Scale(
    32, 64, 16, 64, (16, 32), (32, 64),
    ("--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "64", "--text", "te_fuser/ops"),
    3, 3,
)  # fmt: skip


@dataclass(frozen=True)
class Bench:
    """Where, how big and how long to measure; `tune`: whether te_fuser's models may measure their choices first."""

    card: Card
    scale: Scale = field(default_factory=Scale)
    effort: Effort = field(default_factory=Effort)
    with_compile: bool = True
    tune: bool = False

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.card.device

    @property
    def options(self) -> dict[str, Any]:
        """Of te_fuser's models: what falls back to PyTorch's operations is not what is to be measured."""
        return {"fallback": "error"} if self.card.is_gpu else {}

    def build(self, builder: Builder, tokens: int, hidden: int, **options: object) -> models.Pair:
        """A pair, made on the device."""
        with self.device:
            return builder(tokens, hidden, **{**self.options, **options})

    def compiled(self, model: torch.nn.Module) -> torch.nn.Module:
        """By torch.compile, forgetting what was compiled before: its limit on recompilation is for one model."""
        torch._dynamo.reset()
        return torch.compile(model)  # type: ignore[return-value]


@dataclass(frozen=True)
class Part:
    """One run's worth: ends within five minutes on an H200, in about so many seconds."""

    meaning: str
    run: Callable[[Bench], Iterator[Entry]]
    seconds: int


# ---------------------------------------------------------------------------------------------- whole models


@dataclass(frozen=True)
class Case:
    """A model against its floor and its rivals.

    Attributes:
        goals: what is to be reached.
        memories: which memory= beside "balanced".
        without: fusions; beside the plan with one of them there is one that has to do without it.
        library: under which name gpu_rivals knows it.
    """

    name: str
    builder: Builder
    works: Sequence[Work]
    tokens: int
    hidden: int
    dtype: torch.dtype
    goals: tuple[Goal, ...] = ()
    memories: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    library: str = ""
    dropout: float = 0.0
    with_plan: bool = False


def measure_case(bench: Bench, case: Case) -> Entry:
    """Everything about one model."""
    torch.manual_seed(0)
    entrants = _model_rivals(bench, case)
    found = entrants.found
    floor = make_floor(case.works, case.dtype, bench.card)  # after tuning: its products too run as tuned
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    results = contest(steps, bench.effort, bench.card)
    entry = compared(case.name, results)
    entry |= {"floor_products": floor.taken, **entrants.remarks()}
    _add_details(entry, steps, found, bench.card)
    if case.with_plan:
        attempt(entry, "the plan's times", lambda: entry.update(plan=plan_rows(found[OURS])))
    entry["goals"] = judged(case.goals, entry)
    return entry


def attempt(entry: Entry, what: str, measure: Callable[[], object]) -> None:
    """Measure more of an entry; what fails does not take the rest along."""
    try:
        measure()
    except Exception as error:
        entry.setdefault("left_out", {})[what] = why(error)


@dataclass
class Entrants:
    """Who takes part, and who could not: a rival that fails must not take the others' numbers along."""

    found: dict[str, Rival]
    card: Card
    left_out: dict[str, str] = field(default_factory=dict)
    tuning: str = ""

    def add(self, name: str, make: Callable[[], Rival]) -> None:
        """Make a contender and let it run once."""
        self.card.synchronize()  # what an earlier one did wrong is not this one's
        try:
            rival = make()
            rival.forward_and_backward()
            self.card.synchronize()
        except Exception as error:
            self.left_out[name] = why(error)
        else:
            self.found[name] = rival

    def remarks(self) -> dict[str, Any]:
        """For an entry."""
        found = {"left_out": self.left_out, "tuning": self.tuning}
        return {key: value for key, value in found.items() if value}


def why(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:_LONGEST_REASON]


_LONGEST_REASON = 500


def _model_rivals(bench: Bench, case: Case) -> Entrants:
    pair = bench.build(case.builder, case.tokens, case.hidden)
    entrants = Entrants(rivals(pair, case.dtype, bench.device), bench.card)
    eager = entrants.found["eager"]
    for rival in list(entrants.found.values()):
        rival.forward_and_backward()  # plans are made before anything is tuned
    if bench.with_compile:
        entrants.add("torch.compile", lambda: eager.like(bench.compiled(pair.eager)))
    for memory in case.memories:
        entrants.add(f"{OURS} {memory}", lambda memory=memory: _ours(bench, case, pair, eager, memory=memory))  # type: ignore[misc]
    ours = entrants.found[OURS]
    plan = ours.model.plan(ours.x, **ours.named)
    for name in {step.name for step in (*plan.forward, *plan.backward)}.intersection(case.without):
        entrants.add(f"{OURS} without {name}", lambda name=name: ours.like(_Without(ours.model, name)))  # type: ignore[misc]
    libraries = gpu_rivals.installed(case.library, case.hidden, case.dropout) if bench.card.is_gpu else {}
    for name, make in libraries.items():
        entrants.add(name, lambda make=make: eager.like(make().to(bench.device, case.dtype)))  # type: ignore[misc]
    if bench.tune:
        tuned = _ours(bench, case, pair, eager)
        entrants.tuning = str(tuned.model.tune(tuned.x, rounds=3, seconds=0.1, **tuned.named))
        entrants.add(f"{OURS} tuned", lambda: tuned)
    return entrants


class _Without(torch.nn.Module):
    """A model that is planned without a fusion."""

    def __init__(self, model: torch.nn.Module, fusion: str) -> None:
        super().__init__()
        self.model, self.fusion = model, fusion

    def forward(self, x: torch.Tensor, **named: torch.Tensor) -> torch.Tensor:
        with te_fuser.fusions.disabled(self.fusion):
            return self.model(x, **named)


def _ours(bench: Bench, case: Case, pair: models.Pair, eager: Rival, **options: object) -> Rival:
    """Another model of te_fuser with eager's parameters."""
    other = bench.build(case.builder, case.tokens, case.hidden, **options).fused
    copy_parameters(pair.eager, other)
    return eager.like(other.to(bench.device, case.dtype))


def _memory(rival: Rival, card: Card) -> dict[str, Any]:
    rival.clear()
    peak = peak_bytes(rival.forward_and_backward, card)
    rival.clear()
    kept = kept_bytes(lambda: rival.model(rival.x, **rival.named), list(rival.model.parameters()))
    return {"kept_mib": kept / MIB, **({} if peak is None else {"peak_mib": peak / MIB})}


def _add_details(entry: Entry, steps: Mapping[str, Step], found: Mapping[str, Rival], card: Card) -> None:
    attempt(entry, "kernels", lambda: _add_kernels(entry, steps, card))
    attempt(entry, "memory", lambda: _add_memory(entry, found, card))


def _add_kernels(entry: Entry, steps: Mapping[str, Step], card: Card) -> None:
    for name, step in steps.items():
        trace = traced(step, card)
        entry["contenders"][name] |= trace.as_data() if trace else {}


def _add_memory(entry: Entry, found: Mapping[str, Rival], card: Card) -> None:
    for name, rival in found.items():
        entry["contenders"][name] |= _memory(rival, card)
    eager = entry["contenders"]["eager"].get("peak_mib")
    for data in entry["contenders"].values():
        if eager and "peak_mib" in data:
            data["peak_over_eager"] = data["peak_mib"] / eager


def compared(case: str, results: Mapping[str, Result]) -> Entry:
    """An entry with every contender's numbers over the floor's, eager's and the best rival's."""
    bound = next((results[name] for name in BOUNDS if name in results), None)
    contenders = {name: result.as_data() for name, result in results.items()}
    for name, data in contenders.items():
        if bound is not None:
            data["over_floor"] = results[name].over(bound)
        if "eager" in results:
            data["over_eager"] = results[name].over(results["eager"])
    entry: Entry = {"case": case, "contenders": contenders}
    if bound is not None and "eager" in results:
        _add_earlier(entry)
    _add_best_rival(entry)
    return entry


def _add_earlier(entry: Entry) -> None:
    """Rivals that are not here stand by what they reached earlier."""
    earlier = gpu_rivals.earlier_over_floor(entry["case"], entry["contenders"]["eager"]["over_floor"])
    missing = {name: ratio for name, ratio in earlier.items() if name not in entry["contenders"]}
    if missing:
        entry["earlier"] = {"source": gpu_rivals.EARLIER_SOURCE, "over_floor": missing}


def _add_best_rival(entry: Entry) -> None:
    contenders = entry["contenders"]
    measure = "over_floor" if any("over_floor" in data for data in contenders.values()) else "ms"
    known = {name: data[measure] for name, data in contenders.items() if _is_rival(name)}
    known |= entry.get("earlier", {}).get("over_floor", {})
    if not known:
        return
    best = min(known, key=lambda name: known[name])
    entry["best_rival"] = best
    for name, data in contenders.items():
        if name.startswith(OURS):
            data["over_best_rival"] = data[measure] / known[best]


def _is_rival(name: str) -> bool:
    return name not in BOUNDS and not name.startswith(OURS)


def plan_rows(rival: Rival) -> list[dict[str, Any]]:
    """The steps of the plan with predicted and measured times: where the time goes."""
    from te_fuser.fuser.explain import step_rows

    explanation = rival.model.explain(rival.x, measure=True, **rival.named)
    rows = []
    for plan, measured in zip(explanation.plans, explanation.measured, strict=True):
        for direction in ("forward", "backward"):
            for row in step_rows(plan, direction, measured):
                rows.append(
                    {
                        "direction": direction,
                        "step": row.name,
                        "ops": ", ".join(dict.fromkeys(c.split()[0] for c in row.covers)),
                        "moved_mib": (row.read + row.written) / MIB,
                        "predicted_ms": 1e3 * row.seconds,
                        "measured_ms": 1e3 * (row.measured or 0.0),
                        "limit": row.limit,
                        "share": row.share,
                    }
                )
    return rows


def _seed_case(bench: Bench, dtype: torch.dtype, dropout: float, **options: Any) -> Case:
    scale, attention = bench.scale, bench.scale.attention(dropout)
    return Case(
        f"seed layer {_SHORT_NAMES[dtype]} dropout {dropout:g}",
        models.gpt(dropout, attention),
        [layer_work(attention, mlp_work)(scale.tokens, scale.hidden)],
        scale.tokens,
        scale.hidden,
        dtype,
        library="seed layer",
        dropout=dropout,
        **options,
    )


_PACKS = "attention_cuda_cudnn_frontend"  # takes part where NVIDIA's front end of cuDNN is installed


def layer(bench: Bench) -> Iterator[Entry]:
    """The seed layer in bfloat16."""
    options: dict[str, Any] = {"goals": gpu_goals.SEED_LAYER, "without": (_PACKS,)}
    more: dict[str, Any] = {"memories": ("fast", "lean"), "with_plan": True}
    yield measure_case(bench, _seed_case(bench, torch.bfloat16, 0.1, **options, **more))
    yield measure_case(bench, _seed_case(bench, torch.bfloat16, 0.0, **options))


def layer_fp16(bench: Bench) -> Iterator[Entry]:
    """The seed layer in float16."""
    for dropout in (0.1, 0.0):
        yield measure_case(bench, _seed_case(bench, torch.float16, dropout, goals=(AHEAD,)))


def mlp(bench: Bench) -> Iterator[Entry]:
    """MLP blocks, and a product with bias and residual."""
    rows = (
        ("LayerNorm-GELU MLP", models.mlp, mlp_work, gpu_goals.GELU_MLP),
        ("RMSNorm-SwiGLU MLP", models.gated_mlp, gated_work, (over_floor(1.05), AHEAD)),
        ("Linear + bias + residual", models.linear_residual, linear_residual_work, (over_floor(1.02),)),
    )
    tokens, hidden = bench.scale.tokens, bench.scale.hidden
    for name, builder, work, goals in rows:
        works = [work(tokens, hidden)]
        case = Case(f"{name} bf16", builder, works, tokens, hidden, torch.bfloat16, goals=goals, library=name)
        yield measure_case(bench, replace(case, memories=("fast",) if name.endswith("MLP") else ()))


def llama(bench: Bench) -> Iterator[Entry]:
    """A layer of Llama with 32 query and 8 key/value heads."""
    scale = bench.scale
    attention = scale.attention(sharing=4, rotary=True)
    works = [layer_work(attention, gated_work)(scale.tokens, scale.hidden)]
    builder = models.llama(attention)
    yield measure_case(
        bench, Case("Llama layer bf16", builder, works, scale.tokens, scale.hidden, torch.bfloat16, goals=(AHEAD,))
    )


STACKED = 4
SEPARATE = f"{OURS}, separate layers"


def stack(bench: Bench) -> Iterator[Entry]:
    """Four seed layers in one Sequential, and as four Sequentials."""
    scale, attention = bench.scale, bench.scale.attention(0.1)
    torch.manual_seed(0)
    build = models.gpt(0.1, attention)
    pairs = [bench.build(build, scale.tokens, scale.hidden) for _ in range(STACKED)]
    eager = torch.nn.Sequential(*(p.eager for p in pairs))
    one = te_fuser.Sequential(*(p.fused for p in pairs), **bench.options)
    found = rivals(models.Pair(eager, one, pairs[0].shape, exact=False), torch.bfloat16, bench.device)
    found[SEPARATE] = found[OURS].like(torch.nn.Sequential(*(p.fused for p in pairs)))
    works = layer_work(attention, mlp_work)(scale.tokens, scale.hidden).times(STACKED)
    floor = make_floor(works, torch.bfloat16, bench.card)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    results = contest(steps, bench.effort, bench.card)
    entry = compared(f"{STACKED} seed layers bf16 dropout 0.1", results)
    contenders = entry["contenders"]
    entry["over_separate"] = contenders[OURS]["over_separate"] = results[OURS].over(results[SEPARATE])
    _add_details(entry, steps, found, bench.card)
    entry["goals"] = judged((Goal("over_separate", 1.0), AHEAD), entry)
    yield entry


# --------------------------------------------------------------------------------------------------- glue


@dataclass(frozen=True)
class Stretch:
    """What stands between products.

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
    """Those of a layer."""
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
        entrants = Entrants(rivals(pair, torch.bfloat16, bench.device), bench.card)
        eager = entrants.found["eager"]
        if bench.with_compile:
            entrants.add("torch.compile", lambda: eager.like(bench.compiled(pair.eager)))  # noqa: B023 - called at once
        if bench.card.is_gpu:
            for name, make in gpu_rivals.installed(stretch.name, stretch.hidden, 0.0).items():
                entrants.add(name, lambda make=make: eager.like(make().to(bench.device, torch.bfloat16)))  # type: ignore[misc] # noqa: B023
        for k, direction in enumerate(("forward", "forward+backward")):
            yield _glue_entry(bench, effort, stretch, entrants, direction, k)
        _forget()


def _glue_entry(bench: Bench, effort: Effort, stretch: Stretch, entrants: Entrants, direction: str, k: int) -> Entry:
    moved = stretch.units[k] * stretch.tokens * stretch.hidden * torch.bfloat16.itemsize
    sets = [next(iter(entrants.found.values())).again() for _ in range(SETS)]
    steps = {"copy": recorded([_copying(moved, bench.device) for _ in range(SETS)], bench.card)}
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


def _copying(moved: int, device: torch.device) -> Step:
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


# --------------------------------------------------------------------------------------------------- host

HOST_TOKENS, HOST_HIDDEN = 16, 256


def host(bench: Bench) -> Iterator[Entry]:
    """What a call costs: so few numbers that only the host counts."""
    rows = (("LayerNorm + Linear + GELU + Linear", models.four_ops, 0.55), ("Linear alone", models.linear, 1.0))
    effort = no_longer(bench.effort, SHORT)
    for name, builder, most in rows:
        torch.manual_seed(0)
        pair = bench.build(builder, HOST_TOKENS, HOST_HIDDEN)
        entrants = Entrants(rivals(pair, torch.bfloat16, bench.device), bench.card)
        ours, eager = entrants.found[OURS], entrants.found["eager"]
        if bench.with_compile:
            entrants.add("torch.compile", lambda: eager.like(bench.compiled(pair.eager)))  # noqa: B023 - called at once
        if bench.card.is_gpu:
            entrants.add(GRAPHED, lambda: _graphed(ours))  # noqa: B023
        for direction in ("forward", "forward+backward"):
            # A graph holds both directions: its forward alone is not what anyone calls.
            steps = {
                n: r.runner(direction) for n, r in entrants.found.items() if n != GRAPHED or "backward" in direction
            }
            entry = compared(f"{name}, {direction}", contest(steps, effort, bench.card)) | entrants.remarks()
            goals = (Goal("over_eager", most),) if direction == "forward+backward" else ()
            yield entry | {"goals": judged(goals, entry)}


GRAPHED = f"{OURS} cuda_graph"


def _graphed(ours: Rival) -> Rival:
    """The model captured as CUDA graphs."""
    graphed: Any = te_fuser.cuda_graph(ours.model, ours.x)
    return replace(ours, model=graphed)


# -------------------------------------------------------------------------------------------------- growth


def growth(bench: Bench) -> Iterator[Entry]:
    """Time and memory of the seed layer with more tokens, and with more features."""
    scale = bench.scale
    sizes = [("tokens", t, scale.hidden) for t in scale.growing_tokens]
    sizes += [("hidden", scale.tokens, h) for h in scale.growing_hidden]
    for grows, tokens, hidden in sizes:
        yield {**_of_size(bench, tokens, hidden), "grows": grows, "tokens": tokens, "hidden": hidden}
        _forget()


def _of_size(bench: Bench, tokens: int, hidden: int) -> Entry:
    """The seed layer of a size: floor, eager and te_fuser."""
    torch.manual_seed(0)
    attention = bench.scale.attention(0.1)
    found = rivals(bench.build(models.gpt(0.1, attention), tokens, hidden), torch.bfloat16, bench.device)
    floor = make_floor([layer_work(attention, mlp_work)(tokens, hidden)], torch.bfloat16, bench.card)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    effort = no_longer(bench.effort, Effort(3, 0.5, 0.5))
    entry = compared(f"seed layer, {tokens} x {hidden}", contest(steps, effort, bench.card))
    entry["floor_products"] = floor.taken
    _add_details(entry, steps, found, bench.card)
    return entry


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# -------------------------------------------------------------------------------- runs in their own processes


def first_call(bench: Bench) -> Iterator[Entry]:
    """The first forward and backward of the seed layer in a new process: eager, with an empty and a full cache."""
    scale = bench.scale
    sizes = ["--tokens", str(scale.tokens), "--hidden", str(scale.hidden), "--positions", str(scale.positions)]
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "eager": ["--eager"],
            f"{OURS}, empty cache": ["--cache", folder],
            f"{OURS}, warm cache": ["--cache", folder],
        }
        contenders = {name: _in_child([*sizes, "--device", bench.device.type, *more]) for name, more in runs.items()}
    entry = {"case": "first call of the seed layer bf16 dropout 0.1", "contenders": contenders}
    goals = (Goal("seconds", 10.0, f"{OURS}, empty cache"), Goal("seconds", 1.0, f"{OURS}, warm cache"))
    yield entry | {"goals": judged(goals, entry)}


def _in_child(arguments: Sequence[str]) -> dict[str, Any]:
    return json.loads(_output_of(["benchmarks/gpu_first_call.py", *arguments]).splitlines()[-1])


CHILD_LIMIT = 280  # seconds of a child process: a part ends within five minutes


def _output_of(command: Sequence[str]) -> str:
    """What a Python command prints.

    Raises:
        RuntimeError: when it fails or does not end.
    """
    try:
        # OpenMP's threads spin while they wait, unless told otherwise: beside other processes that takes long.
        environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=CHILD_LIMIT
        )
    except subprocess.TimeoutExpired as expired:
        said = (expired.stdout or b"")[-2000:].decode(errors="replace")
        raise RuntimeError(f"{' '.join(command)} did not end within {CHILD_LIMIT} s:\n{said}") from expired
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


POINTS = 60  # of a loss curve in the record
SMOOTHED = 20  # steps whose mean is compared
EARLY = 10  # steps that are compared one by one
TWIN, OTHER_TWIN = "torch.nn", "torch.nn, another seed"


def train(bench: Bench) -> Iterator[Entry]:
    """The big GPT of examples/train_gpt.py, and its twin in eager PyTorch with the same seed and data."""
    yield _trained(bench, (*bench.scale.train, "--steps", str(bench.scale.train_steps)), (OURS, TWIN))


def train_exact(bench: Bench) -> Iterator[Entry]:
    """The same without dropout: only rounding tells the two apart; and the twin with another seed, as a measure."""
    arguments = (*bench.scale.train, "--dropout", "0", "--steps", str(bench.scale.exact_steps), "--noise")
    entry = _trained(bench, arguments, (OURS, TWIN, OTHER_TWIN))
    entry["goals"] = judged((Goal("difference_over_noise", 1.0),), entry)
    yield entry


def _trained(bench: Bench, arguments: Sequence[str], names: Sequence[str]) -> Entry:
    with tempfile.TemporaryDirectory() as folder:
        kernels = ["--kernels", "generated"] if bench.card.is_gpu else []
        where = ["--device", bench.device.type, *kernels, "--compare", "--out", folder]
        _output_of(["examples/train_gpt.py", *where, *arguments])
        summary = json.loads((Path(folder) / "summary.json").read_text())
        with (Path(folder) / "loss.csv").open() as file:
            rows = list(csv.DictReader(file))
    contenders = {name: _training(name, summary, rows) for name in names}
    ours = contenders[OURS]
    ours["speed_up"] = ours["tokens_per_second"] / contenders[TWIN]["tokens_per_second"]
    entry = {
        "case": "train_gpt.py " + " ".join(arguments),
        "settings": {name: value for name, value in summary["settings"].items() if name != "text"},
        "bigram_loss": summary["bigram_loss"],
        "largest_difference": _largest_difference(rows, OURS),
        "late_difference": _largest_difference(rows[len(rows) // 2 :], OURS),
        "early_difference": _largest_difference(rows[:EARLY], OURS, smoothed=1),
        "contenders": contenders,
    }
    if OTHER_TWIN in names:
        entry["noise"] = _largest_difference(rows, OTHER_TWIN)
        ours["difference_over_noise"] = entry["largest_difference"] / entry["noise"]
    return entry


def _training(name: str, summary: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    losses = [float(row[f"{name} training loss"]) for row in rows]
    validations = [float(v) for row in rows if (v := row[f"{name} validation loss"])]
    every = max(1, len(losses) // POINTS)
    return {
        "tokens_per_second": summary["tokens_per_second"][name],
        "validation_loss": validations[-1],
        "validation_losses": validations,
        "training_losses": [[k + 1, round(losses[k], 4)] for k in range(0, len(losses), every)],
    }


def _largest_difference(rows: Sequence[Mapping[str, str]], name: str, smoothed: int = SMOOTHED) -> float:
    """Between a curve and the twin's, each smoothed over some steps."""
    curves = [[float(row[f"{n} training loss"]) for row in rows] for n in (name, TWIN)]
    width = min(smoothed, len(rows))
    differences = [a - b for a, b in zip(*curves, strict=True)]
    return max(abs(sum(differences[k : k + width]) / width) for k in range(len(rows) - width + 1))


# What the host costs comes first: once the profiler has run in a process, launches take longer.
PARTS: dict[str, Part] = {
    "host": Part(f"what a call costs at {HOST_TOKENS} x {HOST_HIDDEN}", host, 60),
    "layer": Part("the seed layer, bf16, dropout 0.1 and 0, and its plan", layer, 150),
    "layer-fp16": Part("the seed layer, fp16, dropout 0.1 and 0", layer_fp16, 130),
    "mlp": Part("LayerNorm-GELU and RMSNorm-SwiGLU MLPs, Linear + bias + residual", mlp, 210),
    "llama": Part("a Llama layer: RMSNorm, RoPE, 32 query and 8 key/value heads, SwiGLU", llama, 75),
    "stack": Part(f"{STACKED} seed layers in one Sequential and apart", stack, 70),
    "glue": Part("what stands between products, in GB/s and share of a copy", glue, 150),
    "growth": Part("time and memory with the tokens and with the hidden size", growth, 130),
    "first-call": Part("the first call in a new process, empty and warm kernel cache", first_call, 30),
    "train": Part("a GPT of 100 M parameters beside its twin in eager PyTorch", train, 190),
    "train-exact": Part("the same without dropout: both losses, and what another seed changes", train_exact, 130),
}

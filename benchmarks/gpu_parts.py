"""The benchmark's parts: what competes in each of them. A part gives entries, one for each of its cases.

An entry: {"case": name, "contenders": {name: numbers}, ...}. Contenders whose names begin with "te_fuser" are ours,
"floor" and "copy" are what nobody can beat, the others are rivals.
"""

from __future__ import annotations

import csv
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import gpu_rivals
import models
import torch
from common import ROOT
from gpu_floor import Work, gated_work, layer_work, linear_residual_work, make_floor, mlp_work
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
        train: arguments of the training example.
    """

    tokens: int = 8192
    hidden: int = 4096
    positions: int = 2048
    norms: int = 16384
    growing_tokens: tuple[int, ...] = tuple(1024 << k for k in range(7))
    growing_hidden: tuple[int, ...] = (1024, 2048, 4096, 8192)
    train: tuple[str, ...] = ("--size", "large", "--steps", "1000")

    def attention(self, dropout: float = 0.0, **options: Any) -> Attention:
        """A layer's."""
        return Attention(128, self.positions, dropout=dropout, **options)


TOY = Scale(
    32, 64, 16, 64, (16, 32), (32, 64),
    ("--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "2", "--steps", "3"),
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

    def build(self, builder: Builder, tokens: int, hidden: int, **options: object) -> models.Pair:
        """A pair, made on the device."""
        with self.device:
            return builder(tokens, hidden, **options)

    def compiled(self, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
        """By torch.compile, forgetting what was compiled before: its limit on recompilation is for one model."""
        torch._dynamo.reset()
        return torch.compile(model, **options)  # type: ignore[return-value]


@dataclass(frozen=True)
class Part:
    """One run's worth: ends within five minutes on an H200."""

    meaning: str
    run: Callable[[Bench], Iterator[Entry]]


# ---------------------------------------------------------------------------------------------- whole models


@dataclass(frozen=True)
class Case:
    """A model against its floor and its rivals.

    Attributes:
        goal: the largest time over the floor that is good enough.
        memories: which memory= beside "balanced".
        library: under which name gpu_rivals knows it.
    """

    name: str
    builder: Builder
    works: Sequence[Work]
    tokens: int
    hidden: int
    dtype: torch.dtype
    goal: float | None = None
    memories: tuple[str, ...] = ()
    library: str = ""
    dropout: float = 0.0
    with_plan: bool = False


def measure_case(bench: Bench, case: Case) -> Entry:
    """Everything about one model."""
    torch.manual_seed(0)
    floor = make_floor(case.works, case.dtype, bench.card)
    found = _model_rivals(bench, case)
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in found.items()}}
    results = contest(steps, bench.effort, bench.card)
    entry = compared(case.name, results)
    entry["floor_products"] = floor.taken
    if case.goal:
        entry["contenders"][OURS]["goal"] = f"<= {case.goal} of floor"
    for name, step in steps.items():
        trace = traced(step, bench.card)
        entry["contenders"][name] |= trace.as_data() if trace else {}
        if trace and name == OURS:
            entry["kernels"] = [_kernel_row(*row) for row in trace.names.items()]
    for name, rival in found.items():
        entry["contenders"][name] |= _memory(rival, bench.card)
    if case.with_plan:
        entry["plan"] = plan_rows(found[OURS])
    return entry


_NAME_LENGTH = 60  # of a kernel: the libraries' are long, and differ early


def _kernel_row(name: str, run: tuple[float, float]) -> dict[str, Any]:
    return {"kernel": name[:_NAME_LENGTH], "count": run[0], "ms": 1e3 * run[1]}


def _model_rivals(bench: Bench, case: Case) -> dict[str, Rival]:
    pair = bench.build(case.builder, case.tokens, case.hidden)
    found = rivals(pair, case.dtype, bench.device)
    eager = found["eager"]
    if bench.with_compile:
        found["torch.compile"] = eager.like(bench.compiled(pair.eager))
    for memory in case.memories:
        other = bench.build(case.builder, case.tokens, case.hidden, memory=memory).fused
        copy_parameters(pair.eager, other)
        found[f"{OURS} {memory}"] = eager.like(other.to(bench.device, case.dtype))
    libraries = gpu_rivals.installed(case.library, case.hidden, case.dropout) if bench.device.type == "cuda" else {}
    for name, module in libraries.items():
        found[name] = eager.like(module.to(bench.device, case.dtype))
    if bench.tune:
        for name, rival in found.items():
            if name.startswith(OURS):
                rival.model.tune(rival.x, **rival.named)
    return found


def _memory(rival: Rival, card: Card) -> dict[str, Any]:
    rival.clear()
    peak = peak_bytes(rival.forward_and_backward, card)
    rival.clear()
    kept = kept_bytes(lambda: rival.model(rival.x, **rival.named), list(rival.model.parameters()))
    return {"kept_mib": kept / MIB, **({} if peak is None else {"peak_mib": peak / MIB})}


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


def layer(bench: Bench) -> Iterator[Entry]:
    """The seed layer in bfloat16."""
    yield measure_case(
        bench, _seed_case(bench, torch.bfloat16, 0.1, goal=1.05, memories=("fast", "lean"), with_plan=True)
    )
    yield measure_case(bench, _seed_case(bench, torch.bfloat16, 0.0, goal=1.05))


def layer_fp16(bench: Bench) -> Iterator[Entry]:
    """The seed layer in float16."""
    for dropout in (0.1, 0.0):
        yield measure_case(bench, _seed_case(bench, torch.float16, dropout))


def mlp(bench: Bench) -> Iterator[Entry]:
    """MLP blocks, and a product with bias and residual."""
    rows = (
        ("LayerNorm-GELU MLP", models.mlp, mlp_work, 1.03),
        ("RMSNorm-SwiGLU MLP", models.gated_mlp, gated_work, 1.05),
        ("Linear + bias + residual", models.linear_residual, linear_residual_work, 1.02),
    )
    tokens, hidden = bench.scale.tokens, bench.scale.hidden
    for name, builder, work, goal in rows:
        case = Case(
            f"{name} bf16", builder, [work(tokens, hidden)], tokens, hidden, torch.bfloat16, goal=goal, library=name
        )
        yield measure_case(bench, case)


def llama(bench: Bench) -> Iterator[Entry]:
    """A layer of Llama with 32 query and 8 key/value heads."""
    scale = bench.scale
    attention = scale.attention(sharing=4, rotary=True)
    work = layer_work(attention, gated_work)(scale.tokens, scale.hidden)
    yield measure_case(
        bench, Case("Llama layer bf16", models.llama(attention), [work], scale.tokens, scale.hidden, torch.bfloat16)
    )


STACKED = 4


def stack(bench: Bench) -> Iterator[Entry]:
    """Four seed layers in one Sequential, and as four Sequentials."""
    scale, attention = bench.scale, bench.scale.attention(0.1)
    torch.manual_seed(0)
    build = models.gpt(0.1, attention)
    pairs = [bench.build(build, scale.tokens, scale.hidden) for _ in range(STACKED)]
    eager = torch.nn.Sequential(*(p.eager for p in pairs))
    one = te_fuser.Sequential(*(p.fused for p in pairs))
    shape = pairs[0].shape
    found = rivals(models.Pair(eager, one, shape, exact=False), torch.bfloat16, bench.device)
    separate = found[OURS].like(torch.nn.Sequential(*(p.fused for p in pairs)))
    floor = make_floor(
        layer_work(attention, mlp_work)(scale.tokens, scale.hidden).times(STACKED), torch.bfloat16, bench.card
    )
    named = {"eager": found["eager"], OURS: found[OURS], f"{OURS}, separate layers": separate}
    steps: dict[str, Step] = {"floor": floor.run, **{n: r.forward_and_backward for n, r in named.items()}}
    results = contest(steps, bench.effort, bench.card)
    entry = compared(f"{STACKED} seed layers bf16 dropout 0.1", results)
    entry["over_separate"] = results[OURS].over(results[f"{OURS}, separate layers"])
    for name, rival in named.items():
        trace = traced(rival.forward_and_backward, bench.card)
        entry["contenders"][name] |= {**(trace.as_data() if trace else {}), **_memory(rival, bench.card)}
    yield entry


# --------------------------------------------------------------------------------------------------- glue


@dataclass(frozen=True)
class Stretch:
    """What stands between products.

    Attributes:
        units: tensors of [tokens, hidden] that must be moved at the least, forward and forward + backward.
        goal: GB/s of forward + backward on an H200.
    """

    name: str
    builder: Builder
    tokens: int
    hidden: int
    units: tuple[int, int]
    goal: int | None = None


def stretches(scale: Scale) -> tuple[Stretch, ...]:
    """Those of a layer."""
    t, h = scale.tokens, scale.hidden
    return (
        Stretch("LayerNorm", models.layer_norm, scale.norms, h, (2, 5), 3800),
        Stretch("RMSNorm", models.rms_norm, scale.norms, h, (2, 5), 3900),
        Stretch("bias + GELU", models.bias_gelu, t, 4 * h, (2, 5), 3800),
        Stretch("SwiGLU", models.swiglu, t, models.gated_features(h), (3, 8), 4100),
        # The gradient of the residual is the incoming one: nothing is moved for it.
        Stretch("bias + dropout + add", models.bias_dropout_add, scale.norms, h, (3, 5), 3800),
        Stretch("bias + dropout + add + LayerNorm", models.bias_dropout_add_norm, t, h, (4, 9)),
    )


SETS = 3  # inputs that take turns, so that no call finds its own in the cache


def glue(bench: Bench) -> Iterator[Entry]:
    """Stretches between products; each contender is a CUDA graph, so that the host does not count."""
    effort = no_longer(bench.effort, SHORT)
    for stretch in stretches(bench.scale):
        torch.manual_seed(0)
        pair = bench.build(stretch.builder, stretch.tokens, stretch.hidden)
        found = rivals(pair, torch.bfloat16, bench.device)
        if bench.with_compile:
            found["torch.compile"] = found["eager"].like(bench.compiled(pair.eager))
        if bench.device.type == "cuda":
            for name, module in gpu_rivals.installed(stretch.name, stretch.hidden, 0.0).items():
                found[name] = found["eager"].like(module.to(bench.device, torch.bfloat16))
        for units, direction in zip(stretch.units, ("forward", "forward+backward"), strict=True):
            moved = units * stretch.tokens * stretch.hidden * torch.bfloat16.itemsize
            yield _glue_entry(bench, effort, stretch, found, direction, moved)
        _forget()


def _glue_entry(
    bench: Bench, effort: Effort, stretch: Stretch, found: Mapping[str, Rival], direction: str, moved: int
) -> Entry:
    sets = [next(iter(found.values())).again() for _ in range(SETS)]
    steps = {"copy": recorded([_copying(moved, bench.device) for _ in range(SETS)], bench.card)}
    for name, rival in found.items():
        calls = [_pure(inputs.like(rival.model), direction) for inputs in sets]
        steps[name] = recorded(calls, bench.card)
    results = {name: scaled(result, 1 / SETS) for name, result in contest(steps, effort, bench.card).items()}
    name = stretch.name if direction == "forward+backward" else f"{stretch.name}, forward"
    entry = compared(name, results)
    entry |= {"tokens": stretch.tokens, "hidden": stretch.hidden, "moved_mib": moved / MIB}
    if direction == "forward+backward" and stretch.goal:
        entry["contenders"][OURS]["goal"] = f">= {stretch.goal} GB/s"
    for name, data in entry["contenders"].items():
        data |= {"gbps": moved / data["ms"] / 1e6, "of_copy": 1 / data["over_floor"]}
        trace = traced(steps[name], bench.card)
        if trace:
            data["kernels"] = trace.kernels / SETS
    return entry


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

    if card.device.type != "cuda":
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
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
    for name, builder, goal in rows:
        torch.manual_seed(0)
        pair = bench.build(builder, HOST_TOKENS, HOST_HIDDEN)
        found = rivals(pair, torch.bfloat16, bench.device)
        for direction in ("forward", "forward+backward"):
            steps = {n: r.runner(direction) for n, r in found.items()}
            if bench.with_compile:
                steps["torch.compile"] = found["eager"].like(bench.compiled(pair.eager)).runner(direction)
            if direction == "forward+backward" and bench.device.type == "cuda":
                steps[f"{OURS} cuda_graph"] = _graphed(found[OURS])
            entry = compared(f"{name}, {direction}", contest(steps, effort, bench.card))
            if direction == "forward+backward":
                entry["contenders"][OURS]["goal"] = f"<= {goal} of eager"
            yield entry


def _graphed(ours: Rival) -> Step:
    """A step whose model is captured as CUDA graphs."""
    graphed: Any = te_fuser.cuda_graph(ours.model, ours.x)
    return replace(ours, model=graphed).forward_and_backward


# -------------------------------------------------------------------------------------------------- growth


def growth(bench: Bench) -> Iterator[Entry]:
    """Time and memory of the seed layer with more tokens, and with more features."""
    scale = bench.scale
    sizes = [("tokens", t, scale.hidden) for t in scale.growing_tokens]
    sizes += [("hidden", scale.tokens, h) for h in scale.growing_hidden]
    effort = no_longer(bench.effort, Effort(3, 0.5, 0.5))
    for grows, tokens, hidden in sizes:
        torch.manual_seed(0)
        pair = bench.build(models.gpt(0.1, scale.attention(0.1)), tokens, hidden)
        found = rivals(pair, torch.bfloat16, bench.device)
        entry = compared(
            f"seed layer, {tokens} x {hidden}",
            contest({n: r.forward_and_backward for n, r in found.items()}, effort, bench.card),
        )
        entry |= {"grows": grows, "tokens": tokens, "hidden": hidden}
        for name, rival in found.items():
            entry["contenders"][name] |= _memory(rival, bench.card)
        yield entry
        del pair, found
        _forget()


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
    yield {"case": "first call of the seed layer bf16 dropout 0.1", "contenders": contenders}


def _in_child(arguments: Sequence[str]) -> dict[str, Any]:
    return json.loads(_output_of(["benchmarks/gpu_first_call.py", *arguments]).splitlines()[-1])


def _output_of(command: Sequence[str]) -> str:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.stdout


POINTS = 60  # of a loss curve in the record
SMOOTHED = 20  # steps whose mean is compared


def train(bench: Bench) -> Iterator[Entry]:
    """The big GPT of examples/train_gpt.py, and its twin in eager PyTorch with the same seed and data."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["examples/train_gpt.py", "--device", bench.device.type, "--compare", "--out", folder]
        _output_of([*command, *bench.scale.train])
        summary = json.loads((Path(folder) / "summary.json").read_text())
        with (Path(folder) / "loss.csv").open() as file:
            rows = list(csv.DictReader(file))
    contenders = {name: _training(name, summary, rows) for name in (OURS, "torch.nn")}
    ours, theirs = contenders[OURS], contenders["torch.nn"]
    ours["speed_up"] = ours["tokens_per_second"] / theirs["tokens_per_second"]
    yield {
        "case": "train_gpt.py " + " ".join(bench.scale.train),
        "settings": {name: value for name, value in summary["settings"].items() if name != "text"},
        "bigram_loss": summary["bigram_loss"],
        "largest_difference": _largest_difference(rows),
        "late_difference": _largest_difference(rows[len(rows) // 2 :]),
        "contenders": contenders,
    }


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


def _largest_difference(rows: Sequence[Mapping[str, str]]) -> float:
    """Between the two curves, each smoothed over some steps."""
    curves = [[float(row[f"{name} training loss"]) for row in rows] for name in (OURS, "torch.nn")]
    width = min(SMOOTHED, len(rows))
    differences = [a - b for a, b in zip(*curves, strict=True)]
    return max(abs(sum(differences[k : k + width]) / width) for k in range(len(rows) - width + 1))


PARTS: dict[str, Part] = {
    "layer": Part("the seed layer, bf16, dropout 0.1 and 0, and its plan", layer),
    "layer-fp16": Part("the seed layer, fp16, dropout 0.1 and 0", layer_fp16),
    "mlp": Part("LayerNorm-GELU and RMSNorm-SwiGLU MLPs, Linear + bias + residual", mlp),
    "llama": Part("a Llama layer: RMSNorm, RoPE, 32 query and 8 key/value heads, SwiGLU", llama),
    "stack": Part(f"{STACKED} seed layers in one Sequential and apart", stack),
    "glue": Part("what stands between products, in GB/s and share of a copy", glue),
    "host": Part(f"what a call costs at {HOST_TOKENS} x {HOST_HIDDEN}", host),
    "growth": Part("time and memory with the tokens and with the hidden size", growth),
    "first-call": Part("the first call in a new process, empty and warm kernel cache", first_call),
    "train": Part("a GPT of 100 M parameters beside its twin in eager PyTorch", train),
}

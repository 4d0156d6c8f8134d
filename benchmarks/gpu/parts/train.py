"""The parts `train` and `train-exact`, examples/train_gpt.py beside eager PyTorch, and `train-fp8`, beside bfloat16."""

from __future__ import annotations

import csv
import json
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.child import output_of
from benchmarks.gpu.contest.entries import OURS, Entry
from benchmarks.gpu.contest.goals import Goal, judged

POINTS = 50  # of a loss curve in the record, at most
SMOOTHED = 20  # steps whose mean is compared
EARLY = 10  # steps that are compared one by one
RESOLUTION = 1e-5  # of the losses in loss.csv
WITHIN_NOISE = 2.0  # of two runs of one kind, one lies further away than the other half of the time
EVALUATIONS = 20  # of a run in FP8
LAST = 10  # whose mean is compared
WITHIN_BFLOAT16 = 1.01
IN_BFLOAT16 = "te_fuser, bfloat16"
TWIN, NUDGED, COMPILED = "torch.nn", "torch.nn, nudged", "torch.compile"


def train(bench: Bench) -> Iterator[Entry]:
    """The big GPT of examples/train_gpt.py, and its twin in eager PyTorch and by torch.compile: same seed and data."""
    compiled = (("--compile",), (COMPILED,)) if bench.with_compile else ((), ())
    arguments = (*bench.scale.train, "--steps", str(bench.scale.train_steps), *compiled[0])
    yield _trained(bench, arguments, (OURS, TWIN, *compiled[1]))


def train_exact(bench: Bench) -> Iterator[Entry]:
    """Training without dropout: only rounding tells the two apart; and the twin from nudged weights, as a measure."""
    arguments = (*bench.scale.train, "--dropout", "0", "--steps", str(bench.scale.exact_steps), "--nudge")
    entry = _trained(bench, arguments, (OURS, TWIN, NUDGED))
    entry["goals"] = judged((Goal("difference_over_noise", WITHIN_NOISE),), entry)
    yield entry


def train_fp8(bench: Bench) -> Iterator[Entry]:
    """Training in FP8 by delayed scaling and in bfloat16: same seed, batches and masks."""
    steps = ("--steps", str(bench.scale.train_steps), "--validations", str(EVALUATIONS))
    arguments = (*bench.scale.train, "--dtype", "bfloat16", *steps)
    runs = {OURS: _run(bench, (*arguments, "--precision", "fp8")), IN_BFLOAT16: _run(bench, arguments)}
    (summary, rows), plain = runs[OURS], runs[IN_BFLOAT16]
    contenders = {name: _training(OURS, *found) for name, found in runs.items()}
    for data in contenders.values():
        last = data["validation_losses"][-LAST:]
        data["last_losses"] = sum(last) / len(last)
    ours, other = contenders.values()
    ours["speed_up"] = ours["tokens_per_second"] / other["tokens_per_second"]
    ours["loss_over_bfloat16"] = ours["last_losses"] / other["last_losses"]
    both = [
        {**row, f"{TWIN} training loss": of[f"{OURS} training loss"]} for row, of in zip(rows, plain[1], strict=True)
    ]
    entry = {
        "case": "train_gpt.py " + " ".join((*arguments, "--precision", "fp8")),
        **_about(summary, rows),
        "fp8_difference": _largest_difference(both, OURS),
        "contenders": contenders,
    }
    entry["goals"] = judged((Goal("loss_over_bfloat16", WITHIN_BFLOAT16),), entry)
    yield entry


def _run(bench: Bench, arguments: Sequence[str]) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """The summary of a run of the example, and its losses."""
    with tempfile.TemporaryDirectory() as folder:
        kernels = ["--kernels", "generated"] if bench.card.is_gpu else []
        where = ["--device", bench.device.type, *kernels, "--out", folder]
        output_of(["examples/train_gpt.py", *where, *arguments])
        summary = json.loads((Path(folder) / "summary.json").read_text())
        with (Path(folder) / "loss.csv").open() as file:
            return summary, list(csv.DictReader(file))


def _about(summary: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> Entry:
    """Settings of a run in its entry."""
    return {
        "settings": {name: value for name, value in summary["settings"].items() if name != "text"},
        "bigram_loss": summary["bigram_loss"],
        "validation_steps": [int(row["step"]) for row in rows if row[f"{OURS} validation loss"]],
    }


def _trained(bench: Bench, arguments: Sequence[str], names: Sequence[str]) -> Entry:
    summary, rows = _run(bench, ("--compare", *arguments))
    contenders = {name: _training(name, summary, rows) for name in names}
    ours = contenders[OURS]
    for name in {OURS, *names} - {TWIN, NUDGED}:
        data = contenders[name]
        data["speed_up"] = data["tokens_per_second"] / contenders[TWIN]["tokens_per_second"]
    entry = {
        "case": "train_gpt.py " + " ".join(arguments),
        **_about(summary, rows),
        "largest_difference": _largest_difference(rows, OURS),
        "late_difference": _largest_difference(rows[len(rows) // 2 :], OURS),
        "early_difference": _largest_difference(rows[:EARLY], OURS, smoothed=1),
        "contenders": contenders,
    }
    if NUDGED in names:
        entry["noise"] = _largest_difference(rows, NUDGED)
        ours["difference_over_noise"] = entry["largest_difference"] / max(entry["noise"], RESOLUTION)
    return entry


def _training(name: str, summary: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    losses = [float(row[f"{name} training loss"]) for row in rows]
    validations = [float(v) for row in rows if (v := row[f"{name} validation loss"])]
    every = math.ceil(len(losses) / POINTS)
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

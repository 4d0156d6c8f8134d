"""Draws docs/images/fp8-loss.svg of two runs: python docs/images/fp8_loss.py BFLOAT16_RUN FP8_RUN.

They are folders of examples/train_gpt.py; the commands that they were made by stand in docs/how-to/train.md.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from benchmarks.gpu.record.plots import IMAGES, _figure, _plain, _save

COLOURS = {"bfloat16": "#9aa5b1", "FP8": "#d1495b"}
SMOOTHED = 10  # training steps


def losses(run: Path, kind: str) -> list[tuple[int, float]]:
    """(step, loss) of a run, where there is one."""
    with (run / "loss.csv").open() as file:
        rows = [(int(row["step"]), row[f"te_fuser {kind} loss"]) for row in csv.DictReader(file)]
    return [(step, float(loss)) for step, loss in rows if loss]


def smoothed(curve: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Means over the last few steps."""
    values = [loss for _, loss in curve]
    return [
        (step, sum(part) / len(part))
        for k, (step, _) in enumerate(curve)
        if (part := values[max(0, k + 1 - SMOOTHED) : k + 1])
    ]


def draw(runs: dict[str, Path], path: Path) -> None:
    """Both curves of both runs."""
    figure = _figure(6, 3.2)
    axes = figure.subplots()
    for name, run in runs.items():
        axes.plot(*zip(*smoothed(losses(run, "training")), strict=True), color=COLOURS[name], linewidth=1, label=name)
        axes.plot(*zip(*losses(run, "validation"), strict=True), "o", color=COLOURS[name], markersize=4)
    axes.set_ylim(top=3.5)
    axes.set_xlabel("step")
    axes.set_ylabel("loss, nats per byte")
    axes.set_title("training loss (lines) and validation loss (points), on a CPU", fontsize=9)
    axes.legend(fontsize=8, frameon=False)
    _plain(axes)
    _save(figure, path)


if __name__ == "__main__":
    draw(dict(zip(COLOURS, map(Path, sys.argv[1:3]), strict=True)), IMAGES / "fp8-loss.svg")

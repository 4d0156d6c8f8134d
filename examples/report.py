"""Output of a run: progress bar, loss curve, table of losses."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from trainer import Speed

from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step


@dataclass
class Curve:
    """The losses of one model: of each step, and validation losses by the number of steps taken."""

    training: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    def tensors(self) -> dict[str, torch.Tensor]:
        """For a checkpoint."""
        return {
            "training": torch.tensor(self.training, dtype=torch.float64),
            "validation": torch.tensor(self.validation, dtype=torch.float64).reshape(-1, 2),
        }

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, torch.Tensor]) -> Curve:
        """Undo `tensors`."""
        validation = [(int(step), loss) for step, loss in tensors["validation"].tolist()]
        return cls(tensors["training"].tolist(), validation)


def plan_table(plan: Plan, part: str) -> Table:
    """The steps that run operations of a part of the model, in the order they run, with what each step covers."""
    table = Table(box=None, pad_edge=False)
    for direction in ("forward", "backward"):
        table.add_column(direction, style="bold")
        table.add_column("runs as")
    columns = [_steps(plan, steps, part) for steps in (plan.forward, plan.backward)]
    for forward, backward in zip_longest(*columns, fillvalue=("", "")):
        table.add_row(*forward, *backward)
    return table


def _steps(plan: Plan, steps: Sequence[Step], part: str) -> list[tuple[str, str]]:
    rows = []
    for step in steps:
        nodes = plan.graph.nodes[step.start : step.stop]
        if any(f"{node.path}.".startswith(part) for node in nodes):
            rows.append((", ".join(node.op.kind.__name__ for node in nodes), step.name))
    return rows


def progress_bar(console: Console) -> Progress:
    """A bar with fields `loss`, `validation` and `speed`."""
    return Progress(
        TextColumn("training"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("validation {task.fields[validation]}"),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        expand=True,
    )


def comparison(curves: Mapping[str, Curve], speeds: Mapping[str, Speed]) -> Table:
    """Validation losses of all models side by side, and their speed."""
    table = Table(title="validation loss", title_justify="left")
    table.add_column("step", justify="right")
    for name in curves:
        table.add_column(name, justify="right")
    for points in zip(*(curve.validation for curve in curves.values()), strict=True):
        table.add_row(str(points[0][0]), *(f"{loss:.4f}" for _, loss in points))
    table.add_section()
    table.add_row("tokens/s", *(f"{speeds[name].tokens_per_second:,.0f}" for name in curves))
    return table


def duration(seconds: float) -> str:
    """Seconds in words."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def write_losses(curves: Mapping[str, Curve], path: Path) -> None:
    """One row for each step, with two columns for each model."""
    header = ["step"] + [f"{name} {kind} loss" for name in curves for kind in ("training", "validation")]
    validation = {name: dict(curve.validation) for name, curve in curves.items()}
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        for step in range(1, min(len(curve.training) for curve in curves.values()) + 1):
            row: list[object] = [step]
            for name, curve in curves.items():
                row += [f"{curve.training[step - 1]:.5f}", _number(validation[name].get(step))]
            writer.writerow(row)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


def plot_losses(curves: Mapping[str, Curve], bigram: float, path: Path) -> None:
    """The curves over the steps, and the bigram model's loss as a line."""
    from matplotlib.figure import Figure  # needs no display, and takes a second to import

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.axhline(bigram, color="gray", linestyle="--", label=f"bigram, {bigram:.2f}")
    for number, (name, curve) in enumerate(curves.items()):
        smooth = _smoothed(curve.training)
        axes.plot(range(1, len(smooth) + 1), smooth, color=f"C{number}", alpha=0.4, label=f"{name}, training")
        steps, losses = zip(*curve.validation, strict=True) if curve.validation else ((), ())
        last = f", {losses[-1]:.2f}" if losses else ""
        axes.plot(steps, losses, color=f"C{number}", marker="o", markersize=4, label=f"{name}, validation{last}")
    axes.set(xlabel="step", ylabel="loss, nats per byte")
    axes.set_ylim(top=1.4 * bigram)  # the first steps, at 5.5, say nothing
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _smoothed(losses: list[float]) -> list[float]:
    """A running mean, so that the noise of single batches does not hide the curve."""
    keep = 0.9
    smooth: list[float] = []
    for loss in losses:
        smooth.append(loss if not smooth else keep * smooth[-1] + (1 - keep) * loss)
    return smooth

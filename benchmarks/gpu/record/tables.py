"""A part of a record as tables and remarks, for a terminal and for the document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.common import markdown_table
from benchmarks.gpu.contest.goals import sentence
from benchmarks.gpu.record.records import Data


@dataclass(frozen=True)
class Column:
    """One number of a contender; a column that stays empty is left out."""

    head: str
    key: str
    text: str = "{:.2f}"

    def cell(self, data: Data) -> str:
        """The number, or nothing."""
        value = data.get(self.key)
        return "" if value is None else self.text.format(value)


def _time(data: Data) -> str:
    if "ms" not in data:
        return ""
    low, high = data["range_ms"]
    digits = 3 if data["ms"] < 10 else 2
    return f"{data['ms']:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


COLUMNS = (
    Column("J", "joules", "{:.4g}"),
    Column("MHz", "mhz", "{:.0f}"),
    Column("goal", "goal", "{}"),  # of older records
    Column("over floor", "over_floor", "{:.3f}"),
    Column("over eager", "over_eager", "{:.3f}"),
    Column("over best rival", "over_best_rival", "{:.3f}"),
    Column("over list", "over_list", "{:.3f}"),
    Column("us over list", "us_over_list", "{:.1f}"),
    Column("over own products", "over_own_products", "{:.3f}"),
    Column("GB/s", "gbps", "{:.0f}"),
    Column("of copy", "of_copy", "{:.0%}"),
    Column("beyond the floor over collectives", "excess_over_communication"),
    Column("of one GPU", "of_one_gpu"),
    Column("efficiency", "efficiency", "{:.3f}"),
    Column("over products", "over_products", "{:.3f}"),
    Column("us a parameter", "us_a_parameter", "{:.1f}"),
    Column("error", "error", "{:.1e}"),
    Column("kernels", "kernels", "{:.0f}"),
    Column("memsets", "memsets", "{:.0f}"),
    Column("kept MiB", "kept_mib", "{:.0f}"),
    Column("peak MiB", "peak_mib", "{:.0f}"),
    Column("first call s", "seconds"),
    Column("second call s", "second_call", "{:.4f}"),
    Column("tokens/s", "tokens_per_second", "{:,.0f}"),
    Column("validation loss", "validation_loss", "{:.4f}"),
)


def table_of(cases: Sequence[Data]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) of a part: a row for each contender, then one for each rival that was measured earlier."""
    everyone = [data for entry in cases for data in entry["contenders"].values()]
    columns = [c for c in COLUMNS if any(c.cell(data) for data in everyone)]
    timed = any("ms" in data for data in everyone)
    rows = []
    for entry in cases:
        for k, (name, data) in enumerate(entry["contenders"].items()):
            times = [_time(data)] if timed else []
            rows.append([entry["case"] if k == 0 else "", name, *times, *(c.cell(data) for c in columns)])
        for name, ratio in entry.get("earlier", {}).get("over_floor", {}).items():
            cells = [f"{ratio:.3f}" if c.key == "over_floor" else "" for c in columns]
            rows.append(["", f"{name} (earlier)", *([""] if timed else []), *cells])
    return ["case", "contender", *(["ms (range)"] if timed else []), *(c.head for c in columns)], rows


def remarks(cases: Sequence[Data]) -> list[str]:
    """Lines beside the tables: goals, who was left out, which kernels te_fuser and the floor launch."""
    lines = []
    for entry in cases:
        goals = "; ".join(map(sentence, entry.get("goals", ())))
        lines += [f"{entry['case']}, goals: {goals}"] if goals else []
        lines += [f"{entry['case']}: {name} left out: {reason}" for name, reason in entry.get("left_out", {}).items()]
        lines += [entry["tuning"]] if "tuning" in entry else []
        for name in ("floor", "te_fuser"):
            launched = kernels_in_order(entry["contenders"].get(name, {}))
            lines += [f"{entry['case']}, kernels of {name}: {launched}"] if launched else []
    return lines


_SHOWN = 48  # letters of a kernel's name


def kernels_in_order(data: Data) -> str:
    """The kernels of one step as they began, each with its mean time; sorted by nothing where steps differ."""
    rows = data.get("by_name", [])
    numbers = data.get("order") or range(len(rows))
    shown = []
    for row in (rows[k] for k in numbers):
        times = "" if data.get("order") else f"{row['count']:g} x "
        shown.append(f"{times}{row['kernel'][:_SHOWN]} {1e6 * row['ms'] / 1e3 / row['count']:.0f} us")
    return " | ".join(shown)


def rich_table(part: str, cases: Sequence[Data]) -> Table:
    """A part for a terminal."""
    header, rows = table_of(cases)
    table = Table(title=part, title_justify="left", box=None, pad_edge=False)
    for k, head in enumerate(header):
        table.add_column(head, justify="right" if k > 1 else "left")
    for row in rows:
        table.add_row(*row, style="bold" if row[1].startswith("te_fuser") else "")
    return table


def print_list(console: Console, parts: Mapping[str, Any]) -> None:
    """Print what each part of a command measures, and about how long it takes."""
    for name, part in parts.items():
        console.print(f"{name:<12} about {part.seconds:3} s  {part.meaning}")


def print_part(console: Console, name: str, title: str, cases: Sequence[Data], problem: str) -> None:
    """A part on a terminal: its table, remarks, and why that is not everything, if it is not."""
    if cases:
        console.print(rich_table(f"{name}: {title}", cases))
    for line in remarks(cases):
        console.print(line, soft_wrap=True, markup=False)
    if problem:
        console.print(f"the part {name} is not complete: {problem}", style="red", markup=False, soft_wrap=True)


def plan_table(entry: Data) -> str:
    """The steps of a plan for a document: where the time goes."""
    total = sum(row["measured_ms"] for row in entry["plan"])
    rows = [
        (
            row["direction"],
            f"`{row['step']}`",
            row["ops"],
            f"{row['moved_mib']:.0f}",
            f"{row['predicted_ms']:.3f}",
            f"{row['measured_ms']:.3f}",
            f"{row['measured_ms'] / total:.1%}" if total else "",
            f"{row['limit']}{'' if row['share'] is None else format(row['share'], ' .0%')}",
        )
        for row in entry["plan"]
    ]
    rows.append(("both", "", "", "", f"{sum(r['predicted_ms'] for r in entry['plan']):.3f}", f"{total:.3f}", "", ""))
    header = ("direction", "step", "ops", "moved MiB", "predicted ms", "measured ms", "share", "limit")
    return markdown_table(header, rows, words=3)


def time_table(entry: Data) -> str:
    """Table of each contender's time: products, attention, everything else, and no kernel."""
    keys = ("products_ms", "attention_ms", "rest_ms", "idle_ms")
    rows = [
        (name, *(f"{data[key]:.3f}" for key in keys), f"{data['rest_ms'] + data['idle_ms']:.3f}")
        for name, data in entry["contenders"].items()
        if keys[0] in data
    ]
    header = ("contender", "products", "attention", "other kernels", "no kernel", "beyond the products")
    return markdown_table(header, rows)

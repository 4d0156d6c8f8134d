"""Records of GPU benchmarks: one JSON for each GPU, whose parts are replaced one by one; tables and document."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import gpu_goals
import gpu_rivals
import torch
from common import ROOT, command_line, commit, markdown_table, replace_between, versions, without_folders
from gpu_measure import Card, Effort
from rich.table import Table

RESULTS = ROOT / "benchmarks/results"
DOCUMENT = ROOT / "docs/performance.md"

Data = Mapping[str, Any]


# -------------------------------------------------------------------------------------------------- records


def record_path(card_name: str, kind: str = "gpu") -> Path:
    """Where a GPU's record lies."""
    return RESULTS / f"{kind}-{'-'.join(re.findall('[a-z0-9]+', card_name.lower()))}.json"


def records() -> list[dict[str, Any]]:
    """The benchmark's records of every GPU; those of tests and of lone kernels lie beside them."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob("gpu-*.json"))]
    return [record for record in found if any("cases" in part for part in record.get("parts", {}).values())]


def circumstances(card: Card, given_commit: str | None) -> dict[str, Any]:
    """What a part's numbers depend on."""
    found = {**versions(), **gpu_rivals.versions()}
    if torch.version.cuda:
        found |= {"cuda": torch.version.cuda, "cudnn": str(torch.backends.cudnn.version())}
    return {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "gpu": card.name,
        "commit": given_commit or commit(),
        "versions": found,
        "command": command_line(),
        "card": card.describe(),
    }


def part_record(about: Data, effort: Effort, options: Data, seconds: float, cases: Sequence[Data]) -> dict[str, Any]:
    """One part's share of a record; `options` beside the effort: "quick", "compile", "tune"."""
    lengths = {"rounds": effort.rounds, "block_seconds": effort.block, "warm_up_seconds": effort.warm_up}
    return {**about, "options": {**lengths, **options}, "seconds": round(seconds, 1), "cases": list(cases)}


def merge(path: Path, part: str, record: Data) -> dict[str, Any]:
    """Put a part's record into the file, beside those of other parts; what stands at the top is the latest part's."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts[part] = dict(record)
    top = {key: record[key] for key in ("written", "gpu", "commit", "versions", "command") if key in record}
    merged = {**top, "parts": dict(sorted(parts.items()))}
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")  # who is stopped while writing leaves the old one whole
    draft.write_text(_as_text(_rounded(merged)) + "\n")
    draft.replace(path)
    return merged


def take_in(path: Path) -> Path:
    """Put the parts of a record that was written elsewhere into that of its GPU, and say where that is.

    A part that was not finished does not replace one that is there.
    """
    found = json.loads(path.read_text())
    kind = "gpu-tests" if any("passed" in part for part in found["parts"].values()) else "gpu"
    target = record_path(found["gpu"], kind)
    there = json.loads(target.read_text())["parts"] if target.exists() else {}
    for name, part in sorted(found["parts"].items(), key=lambda item: item[1]["written"]):
        if "problem" not in part or name not in there:
            merge(target, name, {**part, "command": without_folders(part["command"])})
    return target


def _as_text(value: Any) -> str:
    """JSON with lists of numbers on one line each."""
    text = json.dumps(value, indent=1)
    return re.sub(r"\[\s+[^\[\]{}]*?\s+\]", lambda found: f"[{' '.join(found[0][1:-1].split())}]", text)


def _rounded(value: Any) -> Any:
    """Six significant digits are more than any clock gives."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, list) else value


# --------------------------------------------------------------------------------------------------- tables


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
    Column("over own products", "over_own_products", "{:.3f}"),
    Column("GB/s", "gbps", "{:.0f}"),
    Column("of copy", "of_copy", "{:.0%}"),
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
    """What the tables do not show: goals, who was left out, which kernels te_fuser and the floor launch."""
    lines = []
    for entry in cases:
        goals = "; ".join(map(gpu_goals.sentence, entry.get("goals", ())))
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
    return _table(("direction", "step", "ops", "moved MiB", "predicted ms", "measured ms", "share", "limit"), rows, 3)


def time_table(entry: Data) -> str:
    """Where each contender's time goes: products, attention, everything else, and nothing."""
    keys = ("products_ms", "attention_ms", "rest_ms", "idle_ms")
    rows = [
        (name, *(f"{data[key]:.3f}" for key in keys), f"{data['rest_ms'] + data['idle_ms']:.3f}")
        for name, data in entry["contenders"].items()
        if keys[0] in data
    ]
    return _table(("contender", "products", "attention", "other kernels", "no kernel", "beyond the products"), rows, 1)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int) -> str:
    """A table whose first columns are words."""
    lines = markdown_table(header, rows).splitlines()
    marks = ["---"] * words + ["---:"] * (len(header) - words)
    return "\n".join([lines[0], "| " + " | ".join(marks) + " |", *lines[2:]])


# ------------------------------------------------------------------------------------------------- document


def write_docs(records: Sequence[Data], path: Path = DOCUMENT) -> None:
    """Put each part's table, of each GPU, between its marks in the document."""
    for part in sorted({part for record in records for part in record["parts"]}):
        found = [record["parts"][part] for record in records if part in record["parts"]]
        replace_between(path, f"gpu {part}", "\n\n".join(_section(r) for r in found))
    plans = [
        (entry, origin(part))
        for r in records
        for part in r["parts"].values()
        for entry in part["cases"]
        if "plan" in entry
    ]
    if plans:
        replace_between(path, "gpu plan", "\n\n".join(f"{e['case']} ({o}):\n\n{plan_table(e)}" for e, o in plans))
        replace_between(path, "gpu time", "\n\n".join(f"{e['case']} ({o}), ms:\n\n{time_table(e)}" for e, o in plans))


def origin(part: Data) -> str:
    """Of which commit the numbers are, and from how long a run."""
    return f"commit {part['commit']}, {'quick' if part['options']['quick'] else 'full'} run"


def _section(part: Data) -> str:
    used = part["versions"]
    card = ", ".join(f"{name} {value}" for name, value in part["card"].items() if name != "energy")
    libraries = ", ".join(f"{name} {used[name]}" for name in ("torch", "cuda", "cudnn") if name in used)
    when, command = part["written"][:10], part["command"]
    head = f"**{part['gpu']}** ({card}); {libraries}; {origin(part)}, {when};{_effort(part)} `{command}`."
    header, rows = table_of(part["cases"])
    notes = [_note(entry) for entry in part["cases"]] + [_goals(part["cases"]), _slow_copies(part["cases"])]
    if "problem" in part:
        notes.append(f"This part was not measured to its end: {part['problem'].strip().splitlines()[-1]}")
    return "\n\n".join([head, _table(header, rows, 2), *filter(None, notes)])


def _effort(part: Data) -> str:
    """How long it was measured, for a contest; other parts run once. A part may have fewer rounds than asked for."""
    options = part["options"]
    contenders = [data for entry in part["cases"] for data in entry["contenders"].values()]
    rounds = sorted({len(data["rounds_ms"]) for data in contenders if "rounds_ms" in data})
    if not rounds:
        return ""
    hint = " (take it as a hint)" if options["quick"] else ""
    number = " to ".join(map(str, dict.fromkeys((rounds[0], rounds[-1]))))
    noun = "round" if rounds == [1] else "rounds"
    return f" {number} {noun} of blocks of {options['block_seconds']:g} s or less{hint};"


def _goals(cases: Sequence[Data]) -> str:
    """What was to be reached, and whether it was."""
    found = [(e["case"], "; ".join(map(gpu_goals.sentence, e.get("goals", ())))) for e in cases]
    lines = [f"- {case}: {goals}" for case, goals in found if goals]
    return "\n".join(["Goals:", "", *lines]) if lines else ""


_USUAL_COPY = 0.85  # of the fastest one


def _slow_copies(cases: Sequence[Data]) -> str:
    """Copies that ran slower than others are no yardstick."""
    speeds = {e["case"]: e["contenders"]["copy"]["gbps"] for e in cases if "copy" in e["contenders"]}
    slow = [
        f"{case} ({speed:.0f} GB/s)" for case, speed in speeds.items() if speed < _USUAL_COPY * max(speeds.values())
    ]
    return f"The copy ran slowly in {', '.join(slow)}: take the GB/s there, not the ratios." if slow else ""


def _note(entry: Data) -> str:
    """What a table cannot hold."""
    if "over_separate" in entry:
        return f"One Sequential over separate layers: {entry['over_separate']:.3f}."
    if "largest_difference" in entry:
        ours = entry["contenders"]["te_fuser"]
        late = f" ({entry['late_difference']:.3f} in the second half)" if "late_difference" in entry else ""
        noise = ""
        if "noise" in entry:
            early = f", each of the first ten by {entry['early_difference']:.4f} at most"
            _, twin, measure = entry["contenders"]
            noise = f"{early}; those of `{measure}` differ from `{twin}`'s by {entry['noise']:.4f}"
        return (
            f"te_fuser trains {ours['speed_up']:.2f} times as fast. The training losses, averaged over 20 steps, "
            f"differ by {entry['largest_difference']:.4f} nats at most{late}{noise}; "
            f"a bigram model has {entry['bigram_loss']:.3f}."
        )
    return ""

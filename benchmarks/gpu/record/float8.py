"""The record of layers in FP8 as tables of the guides."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import ROOT, markdown_table, replace_between
from benchmarks.gpu.contest.goals import sentence
from benchmarks.gpu.record import records
from benchmarks.gpu.record.records import Data, origin
from benchmarks.gpu.record.tables import Column

KIND = "gpu-float8"
GUIDE, QUICKSTART = ROOT / "docs/how-to/performance.md", ROOT / "docs/quickstart.md"
COLUMNS = (
    Column("ms", "ms"),
    Column("over bfloat16", "over_bfloat16", "{:.3f}"),
    Column("over Transformer Engine", "over_transformer_engine", "{:.3f}"),
    Column("J", "joules"),
    Column("MHz", "mhz", "{:.0f}"),
    Column("kernels", "kernels", "{:.0f}"),
    Column("products ms", "products_ms"),
    Column("attention ms", "attention_ms"),
    Column("other kernels ms", "rest_ms"),
    Column("over its products", "over_own_products", "{:.3f}"),
    Column("over fp8's", "over_tensor_products", "{:.3f}"),
    Column("as copies", "as_copies", "{:.3f}"),
    Column("kept MiB", "kept_mib", "{:.0f}"),
    Column("peak MiB", "peak_mib", "{:.0f}"),
    Column("host ms", "host_ms"),
    Column("host over bfloat16", "host_over_bfloat16"),
)
_SHORT = ("ms", "over_bfloat16", "over_own_products")


def write_docs() -> None:
    """Put the tables of every GPU's record between their marks; without a record the guides stay as they are."""
    found = [json.loads(path.read_text()) for path in sorted(records.RESULTS.glob(f"{KIND}-*.json"))]
    if found:
        replace_between(GUIDE, "gpu float8", "\n\n".join(map(whole, found)))
        replace_between(QUICKSTART, "gpu float8", "\n\n".join(map(short, found)))


def whole(record: Data) -> str:
    """All numbers of a record, and what was to be reached."""
    goals = [f"- {e['case']}: {'; '.join(map(sentence, e['goals']))}" for e in record["cases"] if e.get("goals")]
    parts = [_head(record), table(record["cases"], COLUMNS)]
    return "\n\n".join([*parts, *(["\n".join(["Goals:", "", *goals])] if goals else [])])


def short(record: Data) -> str:
    """The times alone."""
    times = [column for column in COLUMNS if column.key in _SHORT]
    return f"{_head(record)}\n\n{table(record['cases'], times)}"


def _head(record: Data) -> str:
    versions = ", ".join(f"{k} {record['versions'][k]}" for k in ("torch", "cuda") if k in record["versions"])
    sizes = {f"{e['tokens']} x {e['hidden']}" for e in record["cases"]}
    where = f"**{record['gpu']}**, forward and backward of {', '.join(sorted(sizes))}, fp8 by `DelayedScaling`"
    return f"{where}; {versions}; {origin(record)}, {record['written'][:10]}; `{record['command']}`."


def table(cases: Sequence[Data], columns: Sequence[Column]) -> str:
    """`table_of` in Markdown."""
    return markdown_table(*table_of(cases, columns), words=2)


def table_of(cases: Sequence[Data], columns: Sequence[Column]) -> tuple[list[str], list[list[str]]]:
    """(header, rows), a row for each way of each case; columns without any number are left out."""
    everyone: list[Mapping[str, Any]] = [data for e in cases for data in e["contenders"].values()]
    filled = [c for c in columns if any(c.cell(data) for data in everyone)]
    rows = [
        ["" if k else e["case"], way, *(c.cell(data) for c in filled)]
        for e in cases
        for k, (way, data) in enumerate(e["contenders"].items())
    ]
    return ["model", "way", *(c.head for c in filled)], rows

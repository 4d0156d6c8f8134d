"""Records of GPU benchmarks: one JSON for each GPU, whose parts are replaced one by one."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RESULTS, command_line, commit, versions, without_folders
from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.measure import Card, Effort

Data = Mapping[str, Any]


def record_path(card_name: str, kind: str = "gpu") -> Path:
    """Path of a GPU's record."""
    return RESULTS / f"{kind}-{'-'.join(re.findall('[a-z0-9]+', card_name.lower()))}.json"


def of_benchmarks(kind: str = "gpu") -> list[dict[str, Any]]:
    """The benchmark's records of every GPU, or of "ranks"; those of tests and of lone kernels lie beside them."""
    found = [json.loads(path.read_text()) for path in sorted(RESULTS.glob(f"{kind}-*.json"))]
    return [record for record in found if any("cases" in part for part in record.get("parts", {}).values())]


def circumstances(card: Card, given_commit: str | None) -> dict[str, Any]:
    """Circumstances that a part's numbers depend on."""
    found = {**versions(), **libraries.versions()}
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


def origin(part: Data) -> str:
    """Of which commit the numbers are, and from how long a run."""
    return f"commit {part['commit']}, {'quick' if part['options']['quick'] else 'full'} run"


def merge(path: Path, part: str, record: Data) -> dict[str, Any]:
    """Put a part's record into the file, beside those of other parts; what stands at the top is the latest part's."""
    parts = json.loads(path.read_text())["parts"] if path.exists() else {}
    parts[part] = dict(record)
    top = {key: record[key] for key in ("written", "gpu", "commit", "versions", "command") if key in record}
    merged = {**top, "parts": dict(sorted(parts.items()))}
    write(path, merged)
    return merged


def write(path: Path, record: Data) -> None:
    """Write a record at once: who is stopped while writing leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(_as_text(_rounded(record)) + "\n")
    draft.replace(path)


def take_in(path: Path) -> Path:
    """Put the parts of a record that was written elsewhere into that of its GPU, and say where that is.

    A part that was not finished does not replace one that is there. A record without parts, which says its "kind",
    replaces the one of its GPU.
    """
    found = json.loads(path.read_text())
    if "parts" not in found:
        target = record_path(found["gpu"], found["kind"])
        write(target, {**found, "command": without_folders(found["command"])})
        return target
    parts = found["parts"].values()
    ranks = max((part.get("ranks", 1) for part in parts), default=1)
    kind = ("gpu" if ranks == 1 else f"ranks-{ranks}") + "-tests" * any("passed" in part for part in parts)
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

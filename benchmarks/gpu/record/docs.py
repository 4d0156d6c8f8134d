"""The document's share of the records: a table for each part, with what was measured, how long, and what it reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common import ROOT, markdown_table, replace_between
from benchmarks.gpu.contest.goals import sentence
from benchmarks.gpu.record.records import Data, origin
from benchmarks.gpu.record.tables import plan_table, table_of, time_table

DOCUMENT = ROOT / "docs/performance.md"


RANKS = ("layer", "variants", "data", "links", "parameters")  # parts of several ranks that have a table


def write_docs(records: Sequence[Data], path: Path = DOCUMENT, ranks: Sequence[Data] = ()) -> None:
    """Put each part's table, of each GPU, between its marks in the document; of several ranks likewise."""
    for part in sorted({part for record in records for part in record["parts"]}):
        _write(path, f"gpu {part}", [record["parts"][part] for record in records if part in record["parts"]])
    for part in RANKS if ranks else ():
        _write(path, f"ranks {part}", [record["parts"][part] for record in ranks if part in record["parts"]])
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


def _write(path: Path, mark: str, found: Sequence[Data]) -> None:
    replace_between(path, mark, "\n\n".join(map(_section, found)))


def _section(part: Data) -> str:
    used = part["versions"]
    card = ", ".join(f"{name} {value}" for name, value in part["card"].items() if name != "energy")
    libraries = ", ".join(f"{name} {used[name]}" for name in ("torch", "cuda", "cudnn") if name in used)
    when, command = part["written"][:10], part["command"]
    count = f"{part['ranks']} x " if "ranks" in part else ""
    head = f"**{count}{part['gpu']}** ({card}); {libraries}; {origin(part)}, {when};{_effort(part)} `{command}`."
    header, rows = table_of(part["cases"])
    notes = [_note(entry) for entry in part["cases"]] + [_goals(part["cases"]), _slow_copies(part["cases"])]
    if "problem" in part:
        notes.append(f"This part was not measured to its end: {part['problem'].strip().splitlines()[-1]}")
    return "\n\n".join([head, markdown_table(header, rows, words=2), *filter(None, notes)])


def _effort(part: Data) -> str:
    """Rounds and blocks of a contest; other parts run once. A part may have fewer rounds than asked for."""
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
    """Goals, and whether they were met."""
    found = [(e["case"], "; ".join(map(sentence, e.get("goals", ())))) for e in cases]
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
    """Remark that a table cannot hold."""
    if "over_separate" in entry:
        return f"One Sequential over separate layers: {entry['over_separate']:.3f}."
    if "fp8_difference" in entry:
        ours, other = entry["contenders"].values()
        return (
            f"Mean of the last ten evaluations: {ours['last_losses']:.4f} nats in FP8, {other['last_losses']:.4f} in "
            f"bfloat16. The training losses, averaged over 20 steps, differ by {entry['fp8_difference']:.4f} nats at "
            f"most; FP8 trains {ours['speed_up']:.2f} times as fast. A bigram model has {entry['bigram_loss']:.3f}."
        )
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

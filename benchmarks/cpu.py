"""te_fuser against eager torch.nn on a CPU: layers, chains between products, norms, and what a call itself costs.

python -m benchmarks.cpu                      # everything, some ten minutes; writes a record into results/
python -m benchmarks.cpu --case host --quick  # one family, fewer rounds, nothing is written
python -m benchmarks.cpu --case lengths       # calls of ever new lengths, from the first on
python -m benchmarks.cpu --case planning      # how long plans take, of one layer and of twelve
python -m benchmarks.cpu --case presets       # what a preset's call takes beyond that of the bare list of its ops
python -m benchmarks.cpu --write-docs         # everything, and the tables in docs/performance.md
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import lengths, models, planning, presets
from benchmarks.common import (
    RESULTS,
    ROOT,
    SHORT_NAMES,
    Effort,
    Outcome,
    as_data,
    command_parser,
    compete,
    machine,
    markdown_table,
    replace_between,
    write_record,
)
from benchmarks.models import Builder, Rival

LAYERS = ((512, 512), (2048, 1024))  # tokens, hidden
CHAINS = ((2048, 1024), (2048, 4096))
BOTH = (torch.float32, torch.bfloat16)
NEVER_SLOWER = 1.02  # beyond noise


@dataclass(frozen=True)
class Family:
    """Cases of one kind.

    Attributes:
        goal: the largest ratio of te_fuser's time to eager's that is good enough.
    """

    name: str
    build: Builder
    sizes: tuple[tuple[int, int], ...]
    goal: float
    dtypes: tuple[torch.dtype, ...] = BOTH


FAMILIES = (
    Family("mlp", models.mlp, LAYERS, NEVER_SLOWER),
    Family("gpt", models.gpt(0.0), LAYERS, NEVER_SLOWER),
    Family("gpt-dropout", models.gpt(0.1), LAYERS, NEVER_SLOWER),
    Family("chain", models.chain, CHAINS, 0.4),
    Family("layer_norm", models.layer_norm, CHAINS, NEVER_SLOWER),
    Family("rms_norm", models.rms_norm, CHAINS, NEVER_SLOWER),
    Family("swiglu", models.swiglu, CHAINS, NEVER_SLOWER),
    Family("host", models.four_ops, ((16, 256),), 0.8, (torch.float32,)),
)
# What is measured as a whole, not as calls in turns: name -> f(whether in small sizes, the options of models).
WHOLE: dict[str, Callable[[bool, dict[str, Any]], Iterator[dict[str, Any]]]] = {
    "lengths": lambda quick, options: lengths.measured(lengths.QUICK if quick else lengths.Sizes(), options),
    "planning": lambda quick, options: planning.measured(planning.QUICK if quick else planning.Sizes(), options),
    "presets": lambda quick, options: presets.measured(presets.QUICK if quick else presets.Sizes(), options),
}
DIRECTIONS = ("forward", "forward+backward")  # forward: under no_grad


@dataclass(frozen=True)
class Case:
    """One line of the table."""

    family: Family
    tokens: int
    hidden: int
    dtype: torch.dtype
    direction: str

    @property
    def name(self) -> str:
        """Name in tables and records."""
        return f"{self.family.name} {self.tokens}x{self.hidden} {SHORT_NAMES[self.dtype]} {self.direction}"


def cases(families: Sequence[Family], sizes: Sequence[tuple[int, int]] = ()) -> list[Case]:
    """All cases of some families, in other sizes than their own if these are given."""
    return [
        Case(family, tokens, hidden, dtype, direction)
        for family in families
        for tokens, hidden in sizes or family.sizes
        for dtype in family.dtypes
        for direction in DIRECTIONS
    ]


# ------------------------------------------------------------------------------------------------ one case


def rivals(case: Case, options: dict[str, Any]) -> dict[str, Rival]:
    """Both models of a case with the same parameters and the same inputs."""
    torch.manual_seed(0)
    try:
        return models.rivals(case.family.build(case.tokens, case.hidden, **options), case.dtype)
    except RuntimeError as error:
        raise RuntimeError(f"{case.name}: {error}") from error


def run_case(case: Case, effort: Effort, options: dict[str, Any]) -> Outcome:
    """Measure one case."""
    found = rivals(case, options)
    return compete({name: rival.runner(case.direction) for name, rival in found.items()}, effort)


# ------------------------------------------------------------------------------------------------- results


def as_record(case: Case, outcome: Outcome) -> dict[str, Any]:
    """A case and its outcome for the record."""
    return {
        "case": case.name,
        "family": case.family.name,
        "tokens": case.tokens,
        "hidden": case.hidden,
        "dtype": SHORT_NAMES[case.dtype],
        "direction": case.direction,
        "goal": case.family.goal,
        "met": outcome.ratio <= case.family.goal,
        **as_data(outcome),
    }


HEADER = ("case", "eager ms", "te_fuser ms", "ratio", "+-", "goal", "met")


def table_row(entry: dict[str, Any]) -> tuple[str, ...]:
    """One line of the table."""
    eager, ours = (entry["timings"][name]["seconds"] * 1e3 for name in ("eager", "te_fuser"))
    return (
        entry["case"],
        f"{eager:.3f}",
        f"{ours:.3f}",
        f"{entry['ratio']:.2f}",
        f"{entry['ratio_spread'] / 2:.2f}",
        f"{entry['goal']:.2f}",
        "yes" if entry["met"] else "no",
    )


def rich_table(entries: Sequence[dict[str, Any]]) -> Table:
    """The results for a terminal."""
    table = Table(title="medians of one call, te_fuser against eager torch.nn", title_justify="left")
    for k, head in enumerate(HEADER):
        table.add_column(head, justify="right" if k else "left", no_wrap=True)
    for entry in entries:
        table.add_row(*table_row(entry), style="" if entry["met"] else "red")
    return table


def whole_table(entries: Sequence[dict[str, Any]]) -> Table:
    """The results of what is measured as a whole for a terminal."""
    table = Table(title="as a whole: seconds of all calls, MiB, ms of planning, or us of a call", title_justify="left")
    for k, head in enumerate(("case", "measured", "ratio", "goal", "met")):
        table.add_column(head, justify="right" if k > 1 else "left", no_wrap=k != 1)
    for entry in entries:
        numbers = ", ".join(f"{name} {value:.2f}" for name, value in entry["measured"].items())
        met = "yes" if entry["met"] else "no"
        row = (entry["case"], numbers, f"{entry['ratio']:.3f}", f"{entry['goal']:.2f}", met)
        table.add_row(*row, style="" if entry["met"] else "red")
    return table


DOCUMENT_HEADER = ("case", "goal", *(f"{d}: {c}" for d in DIRECTIONS for c in ("eager ms", "te_fuser ms", "ratio")))


def document_rows(entries: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The lines of a document's table: both directions of a case beside each other, ratios beyond the goal in bold."""
    cells: dict[tuple[str, str], list[str]] = {}
    for entry in (e for e in entries if e["family"] not in WHOLE):
        name = entry["case"].removesuffix(f" {entry['direction']}")
        _, eager, ours, ratio, spread, goal, _ = table_row(entry)
        text = f"{ratio} ± {spread}"
        cells.setdefault((name, goal), []).extend((eager, ours, text if entry["met"] else f"**{text}**"))
    return [(*head, *rest) for head, rest in cells.items()]


def write_docs(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Put the table of each record, and what it was measured on, into the document."""
    sections = []
    for record in records:
        at, versions = record["machine"], record["versions"]
        head = (
            f"**{at['processor']}**, {at['abilities']}, {at['threads']} threads; torch {versions['torch']}, Python "
            f"{versions['python']}; commit {record['commit']}, {record['written'][:10]}, {record['options']['rounds']} "
            f"rounds; `{record['command']}`."
        )
        sections.append(f"{head}\n\n{markdown_table(DOCUMENT_HEADER, document_rows(record['cases']))}")
    replace_between(path, "cpu table", "\n\n".join(sections))


def record_path() -> Path:
    """Path of this machine's record."""
    at = machine()
    words = re.findall(r"[a-z0-9]+", f"{at['processor']} {at['threads']} threads".lower())
    return RESULTS / f"cpu-{'-'.join(words)}.json"


# ------------------------------------------------------------------------------------------------- command


def _size(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"a size is TOKENSxHIDDEN, such as 512x512, got {text!r}")
    return int(found[1]), int(found[2])


def _memory(text: str) -> str | int:
    return int(text) if text.isdigit() else text


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    names = [*(f.name for f in FAMILIES), *WHOLE]
    parser = command_parser("benchmarks.cpu", __doc__)
    parser.add_argument("--case", nargs="+", choices=names, metavar="NAME", help=f"only these: {', '.join(names)}")
    parser.add_argument("--size", nargs="+", type=_size, default=(), metavar="TxH", help="tokens x hidden instead")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    parser.add_argument("--threads", type=int, help="PyTorch's threads")
    parser.add_argument("--memory", type=_memory, default="balanced", help="te_fuser.Sequential's memory=")
    parser.add_argument("--record", type=Path, help="where to write (after a full run: results/)")
    parser.add_argument("--write-docs", action="store_true", help="put the records into docs/performance.md")
    found = parser.parse_args(arguments)
    found.is_full = not (found.case or found.size or found.quick)
    if found.write_docs and not found.is_full:
        parser.error("--write-docs needs a full run: without --case, --size and --quick")
    return found


def measured(
    todo: Sequence[Case], effort: Effort, options: dict[str, Any], console: Console
) -> Iterator[dict[str, Any]]:
    """Measure cases one after the other, with a progress bar."""
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(todo))
        for case in todo:
            progress.update(bar, description=case.name)
            yield as_record(case, run_case(case, effort, options))
            progress.advance(bar)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    chosen = parse(arguments)
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    families = [f for f in FAMILIES if not chosen.case or f.name in chosen.case]
    effort = Effort(rounds=3, turn=0.02) if chosen.quick else Effort()
    console = Console()
    options = {"memory": chosen.memory}
    entries = list(measured(cases(families, chosen.size), effort, options, console))
    if entries:
        console.print(rich_table(entries))
        _warn_of_noise(entries, console)
    asked = [f for name, f in WHOLE.items() if not chosen.case or name in chosen.case]
    whole = [entry for measure in asked for entry in measure(chosen.quick, options)]
    if whole:
        console.print(whole_table(whole))
    path = chosen.record or (record_path() if chosen.is_full else None)
    if path is not None:
        write_record(path, [*entries, *whole], {**options, "rounds": effort.rounds})
        console.print(f"record: {path}")
    if chosen.write_docs:
        records = [json.loads(p.read_text()) for p in sorted(RESULTS.glob("cpu-*.json"))]
        write_docs(records, ROOT / "docs/performance.md")
    return 0


def _warn_of_noise(entries: Sequence[dict[str, Any]], console: Console) -> None:
    waited = max((e["waited"] or 0.0 for e in entries), default=0.0)
    if waited > 0.02:
        console.print(f"other processes had the cores for up to {waited:.0%} of a round: repeat on a quieter machine")


if __name__ == "__main__":
    sys.exit(main())

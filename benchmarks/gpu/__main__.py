"""te_fuser on a GPU against its floor, eager PyTorch, torch.compile, and other libraries where they are installed.

python -m benchmarks.gpu                          # every part, some 25 minutes; each case is written when it is done
python -m benchmarks.gpu --part layer glue        # some parts; the record keeps the others as they were
python -m benchmarks.gpu --part layer --quick     # fewer and shorter rounds, nothing is written
python -m benchmarks.gpu --part layer --write-docs  # and the tables in docs/performance.md, and the plots
python -m benchmarks.gpu --list                   # what the parts are, and about how long each takes
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import te_fuser
from benchmarks import scaling
from benchmarks.common import command_parser
from benchmarks.gpu.contest.bench import TOY, Bench, Scale
from benchmarks.gpu.contest.measure import FULL, QUICK, TRIAL, Card, Effort
from benchmarks.gpu.parts.table import PARTS
from benchmarks.gpu.record import docs, float8, plots, records, tables

LIMIT = 300  # seconds of a part: what is not measured by then is left out


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("benchmarks.gpu", __doc__)
    parser.add_argument("--part", nargs="+", metavar="NAME", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; nothing is written")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="a tuned te_fuser takes part in layers and blocks too, a tuned quack in blocks",
    )
    parser.add_argument("--rounds", type=int, help=f"how often each contender has its block (usual: {FULL.rounds})")
    parser.add_argument("--train-steps", type=int, help=f"steps of the part train (usual: {Scale.train_steps})")
    parser.add_argument("--commit", help="what is measured, where the tree is no git repository")
    parser.add_argument("--record", type=Path, help="where to write (usual: results/gpu-<name>.json)")
    parser.add_argument(
        "--take-in", nargs="+", type=Path, metavar="FILE", help="put records from elsewhere into results/; that alone"
    )
    parser.add_argument("--write-docs", action="store_true", help="put the records into docs/performance.md, and plot")
    parser.add_argument("--only-docs", action="store_true", help="that alone: measure nothing")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, one call each, on the CPU: does it run at all")
    found = parser.parse_args(arguments)
    unknown = sorted(set(found.part or ()) - set(PARTS) - {"list"})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    if (found.quick or found.toy) and found.write_docs:
        parser.error("--write-docs needs a whole run: without --quick and --toy")
    if found.rounds is not None and found.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {found.rounds}")
    found.list = found.list or found.part == ["list"]
    return found


def bench_for(chosen: argparse.Namespace) -> Bench:
    """Bench for the command line's options.

    Raises:
        SystemExit: without a GPU.
    """
    if chosen.toy:
        return Bench(Card(torch.device("cpu")), TOY, TRIAL, with_compile=False, tune=chosen.tune)
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU to measure: PyTorch sees none here; --toy tries the command without one")
    effort = QUICK if chosen.quick else FULL
    if chosen.rounds:
        effort = Effort(chosen.rounds, effort.block, effort.warm_up)
    scale = Scale()
    if chosen.train_steps:
        scale = replace(scale, train_steps=chosen.train_steps)
    return Bench(Card(torch.device("cuda")), scale, effort, with_compile=not chosen.no_compile, tune=chosen.tune)


class Writer:
    """Writes a part's record anew after each case, so that whatever ends the run later takes none of them along."""

    def __init__(
        self, path: Path | None, name: str, about: dict[str, Any], chosen: argparse.Namespace, bench: Bench
    ) -> None:
        self.path, self.name, self.about, self.bench = path, name, about, bench
        self.options = {"quick": chosen.quick or chosen.toy, "compile": bench.with_compile, "tune": bench.tune}
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the part began."""
        return time.perf_counter() - self.start

    def write(self, entries: Sequence[dict[str, Any]], problem: str = "not finished") -> None:
        """Put what there is into the record; `problem`: why that is not everything."""
        if self.path is None or not entries:
            return
        record = records.part_record(self.about, self.bench.effort, self.options, self.seconds, entries)
        records.merge(self.path, self.name, {**record, **({"problem": problem} if problem else {})})


def run_part(writer: Writer, console: Console) -> bool:
    """Measure a part, print and write it; whether all of it was measured."""
    part, problem = PARTS[writer.name], ""
    entries: list[dict[str, Any]] = []
    try:
        for entry in part.run(writer.bench):
            entries.append(entry)
            writer.write(entries)
            console.print(f"{writer.name}: {entry['case']} ({writer.seconds:.0f} s)", style="dim")
            if writer.seconds > LIMIT:
                problem = f"stopped after {writer.seconds:.0f} s, as a part should end within {LIMIT} s"
                break
    except Exception:
        problem = traceback.format_exc()
    writer.write(entries, problem)
    tables.print_part(console, writer.name, part.meaning, entries, problem)
    return not problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status is 0 if every part was measured."""
    chosen = parse(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if chosen.list:
        tables.print_list(console, PARTS)
        return 0
    for file in chosen.take_in or ():
        console.print(f"{file} -> {records.take_in(file)}", soft_wrap=True)
    if chosen.only_docs:
        document(console)
    if chosen.only_docs or chosen.take_in:
        return 0
    bench = bench_for(chosen)
    path = chosen.record or (None if chosen.quick or chosen.toy else records.record_path(bench.card.name))
    about = records.circumstances(bench.card, chosen.commit)
    done = [
        run_part(Writer(path, name, about, chosen, bench), console) for name in in_turn(chosen.part or PARTS, bench)
    ]
    if path is not None:
        console.print(f"record: {path}")
    if chosen.write_docs:
        document(console)
    return 0 if all(done) else 1


def in_turn(names: Iterable[str], bench: Bench) -> Iterator[str]:
    """The names; on a GPU each part has empty folders for kernels and for what was tuned: nothing earlier has a say."""
    for name in names:
        if not bench.card.is_gpu:
            yield name
            continue
        with tempfile.TemporaryDirectory() as folder:
            te_fuser.config.cache_dir = Path(folder)
            os.environ["XDG_CACHE_HOME"] = folder  # of child processes
            yield name


def document(console: Console) -> None:
    """Put the records into the documents, and make the plots of the one with most parts."""
    found = records.of_benchmarks()
    if not found:
        console.print(f"no record of a GPU in {records.RESULTS}: nothing to write")
        return
    ranks = records.of_benchmarks("ranks")
    docs.write_docs(found, ranks=ranks)
    float8.write_docs()
    scaling.write_docs()
    plots.write_plots(max(found, key=lambda record: len(record["parts"])), ranks)


if __name__ == "__main__":
    sys.exit(main())

"""te_fuser on a GPU against its floor, eager PyTorch, torch.compile, and other libraries where they are installed.

python benchmarks/gpu.py                          # every part, some half an hour; each is written when it is done
python benchmarks/gpu.py --part layer glue        # some parts; the record keeps the others as they were
python benchmarks/gpu.py --part layer --quick     # fewer and shorter rounds, nothing is written
python benchmarks/gpu.py --part layer --write-docs  # and the tables in docs/performance.md, and the plot
python benchmarks/gpu.py --list                   # what the parts are
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_report
import torch
from gpu_measure import FULL, QUICK, TRIAL, Card, Effort
from gpu_parts import PARTS, TOY, Bench, Scale
from rich.console import Console

LIMIT = 300  # seconds of a part


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", metavar="NAME", help=f"only these: {', '.join(PARTS)}")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; nothing is written")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--tune", action="store_true", help="let te_fuser's layers and blocks tune themselves first")
    parser.add_argument("--rounds", type=int, help=f"how often each contender has its block (usual: {FULL.rounds})")
    parser.add_argument("--train-steps", type=int, help="steps of the part train (usual: 1000)")
    parser.add_argument("--commit", help="what is measured, where the tree is no git repository")
    parser.add_argument("--record", type=Path, help="where to write (usual: results/gpu-<name>.json)")
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
    """What the command line asks for.

    Raises:
        SystemExit: without a GPU.
    """
    if chosen.toy:
        return Bench(Card(torch.device("cpu")), TOY, TRIAL, with_compile=False)
    if not torch.cuda.is_available():
        raise SystemExit("gpu.py measures a GPU, and PyTorch sees none here; --toy tries the command without one")
    effort = QUICK if chosen.quick else FULL
    if chosen.rounds:
        effort = Effort(chosen.rounds, effort.block, effort.warm_up)
    scale = Scale()
    if chosen.train_steps:
        scale = replace(scale, train=("--size", "large", "--steps", str(chosen.train_steps)))
    return Bench(Card(torch.device("cuda")), scale, effort, with_compile=not chosen.no_compile, tune=chosen.tune)


def run_part(name: str, bench: Bench, console: Console) -> tuple[list[dict[str, Any]], float]:
    """A part's entries, and how long it took."""
    start, entries = time.perf_counter(), []
    for entry in PARTS[name].run(bench):
        entries.append(entry)
        console.print(f"{name}: {entry['case']} ({time.perf_counter() - start:.0f} s)", style="dim")
    seconds = time.perf_counter() - start
    console.print(gpu_report.rich_table(f"{name}: {PARTS[name].meaning}", entries))
    if seconds > LIMIT:
        console.print(f"the part {name} took {seconds:.0f} s; a part should end within {LIMIT} s", style="red")
    return entries, seconds


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    chosen = parse(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if chosen.list:
        for name, part in PARTS.items():
            console.print(f"{name:<12} {part.meaning}")
        return 0
    if chosen.only_docs:
        document(console)
        return 0
    bench = bench_for(chosen)
    path = chosen.record or (None if chosen.quick or chosen.toy else gpu_report.record_path(bench.card.name))
    about = gpu_report.circumstances(bench.card, chosen.commit)
    for name in chosen.part or PARTS:
        entries, seconds = run_part(name, bench, console)
        if path is not None:
            record = gpu_report.part_record(about, bench.effort, chosen.quick or chosen.toy, seconds, entries)
            gpu_report.merge(path, name, record)
            console.print(f"record: {path}")
    if chosen.write_docs:
        document(console)
    return 0


def document(console: Console) -> None:
    """Put the records into the document, and make the plot of the first one."""
    found = [json.loads(p.read_text()) for p in sorted(gpu_report.RESULTS.glob("gpu-*.json"))]
    records = [record for record in found if "parts" in record]  # those of tests and of lone kernels are others'
    if not records:
        console.print(f"no record of a GPU in {gpu_report.RESULTS}: nothing to write")
        return
    gpu_report.write_docs(records)
    gpu_report.plot(records[0])


if __name__ == "__main__":
    sys.exit(main())

"""te_fuser on several GPUs of one machine against its floor and PyTorch's ways of sharing a layer.

python -m benchmarks.gpu.ranks --ranks 2                  # every part, under five minutes; results/ranks-2-<name>.json
python -m benchmarks.gpu.ranks --ranks 2 --part layer     # one part; the record keeps the others as they were
python -m benchmarks.gpu.ranks --ranks 2 --quick          # fewer and shorter rounds, nothing is written
python -m benchmarks.gpu.ranks --ranks 2 --toy            # tiny sizes on CPUs: does it run at all
python -m benchmarks.gpu.ranks --ranks 2 --part train     # eight minutes of training: does it hang, does memory grow
python -m benchmarks.gpu.ranks --list                     # what the parts are

Each part starts a process for each rank. One that hangs or ends is started once more without what it was preparing, and
the record says so. NVLink's multicast is never used.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common import ROOT, command_parser
from benchmarks.gpu.contest.measure import Card
from benchmarks.gpu.record import records, tables
from benchmarks.gpu.several.table import PARTS, USUAL_LIMIT
from benchmarks.gpu.several.worker import effort_of

RETRIES = 2
OPTIONS = ("quick", "toy", "no-compile", "tune")  # which ranks are told, too
GRACE = 5.0  # seconds that ranks have left when one of them has ended
# Multicast of one program can take the GPUs of a whole host away from all others; a compiled product of before would
# keep async TP from being compiled.
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "OMP_WAIT_POLICY": "passive",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("benchmarks.gpu.ranks", __doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many processes, each with a GPU (usual: 2)")
    parser.add_argument("--part", nargs="+", metavar="NAME", help=f"only these: {', '.join(PARTS)}; or list")
    parser.add_argument("--list", action="store_true", help="say what the parts are")
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds; nothing is written")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, one call each, on CPUs: does it run at all")
    parser.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    parser.add_argument("--tune", action="store_true", help="a tuned te_fuser takes part in the layer too")
    parser.add_argument("--commit", help="what is measured, where the tree is no git repository")
    parser.add_argument("--record", type=Path, help="where to write (usual: results/ranks-<n>-<name>.json)")
    found = parser.parse_args(arguments)
    if unknown := sorted(set(found.part or ()) - set(PARTS) - {"list"}):
        parser.error(f"there is no part {', '.join(unknown)}; parts: {', '.join(PARTS)}")
    if found.ranks < 2:
        parser.error(f"--ranks must be 2 or more, got {found.ranks}")
    found.list = found.list or found.part == ["list"]
    return found


def check_gpus(ranks: int) -> None:
    """Each rank needs a GPU.

    Raises:
        SystemExit: when there are fewer.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise SystemExit(
            f"--ranks {ranks} needs {ranks} GPUs, and PyTorch sees {found} here; --toy tries the command on CPUs"
        )


# ------------------------------------------------------------------------------------------------- processes


def run_ranks(ranks: int, arguments: Sequence[str], limit: float = USUAL_LIMIT) -> str:
    """Run the workers of one part; what went wrong, in words, or nothing."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, start = [], time.monotonic()
    try:
        for rank in range(ranks):
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            where["MASTER_PORT"] = port
            environment = {**os.environ, **ENVIRONMENT, "MASTER_ADDR": "127.0.0.1"}
            environment |= {name: str(value) for name, value in where.items()}
            command = [sys.executable, "-m", "benchmarks.gpu.several.worker", *arguments]
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment))
        return _outcome(processes, start + limit, limit)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _outcome(processes: Sequence[subprocess.Popen[bytes]], until: float, limit: float) -> str:
    """Wait for all; once one has failed for a few seconds more."""
    failed = ""
    while True:
        codes = [process.poll() for process in processes]  # each of them: what was not asked for is not known
        if any(codes) and not failed:
            failed, until = _ended(codes), time.monotonic() + GRACE
        if None not in codes:
            return failed
        if time.monotonic() > until:
            return failed or f"stopped after {limit:.0f} s"
        time.sleep(0.05)


def _ended(codes: Sequence[int | None]) -> str:
    return ", ".join(f"rank {rank} ended with exit status {code}" for rank, code in enumerate(codes) if code)


def said(path: Path) -> list[dict[str, Any]]:
    """The lines that rank 0 has written."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def measure(name: str, chosen: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any], str]:
    """(entries, what the ranks say of themselves, what went wrong) of a part."""
    without: list[str] = []
    while True:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "said.jsonl"
            options = [f"--{option}" for option in OPTIONS if getattr(chosen, option.replace("-", "_"))]
            arguments = [name, str(out), *options, *(["--without", *without] if without else [])]
            problem = run_ranks(chosen.ranks, arguments, PARTS[name].limit)
            lines = said(out)
        about = next((line["about"] for line in lines if "about" in line), {})
        entries = [line["entry"] for line in lines if "entry" in line]
        preparing = [line["preparing"] for line in lines if "preparing" in line]
        guilty = preparing[-1] if preparing else ""
        if not problem or not guilty or len(without) == RETRIES:
            return entries, about, problem
        without.append(guilty)


# --------------------------------------------------------------------------------------------------- command


def run_part(name: str, chosen: argparse.Namespace, path: Path | None, about: dict[str, Any], console: Console) -> bool:
    """Measure a part, print and write it; whether all of it was measured."""
    start = time.perf_counter()
    entries, found, problem = measure(name, chosen)
    options = {"quick": chosen.quick or chosen.toy, "compile": not chosen.no_compile, "tune": chosen.tune}
    seconds = time.perf_counter() - start
    if entries and path is not None:
        effort = effort_of(chosen.quick, chosen.toy)
        record = records.part_record({**about, **found}, effort, options, seconds, entries)
        records.merge(path, name, {**record, **({"problem": problem} if problem else {})})
    tables.print_part(console, name, f"{PARTS[name].meaning} ({seconds:.0f} s)", entries, problem)
    return not problem


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write; the exit status is 0 if every part was measured."""
    chosen = parse(arguments)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
    if chosen.list:
        tables.print_list(console, PARTS)
        return 0
    if not chosen.toy:
        check_gpus(chosen.ranks)
    card = Card(torch.device("cpu" if chosen.toy else "cuda"))
    usual = None if chosen.quick or chosen.toy else records.record_path(card.name, f"ranks-{chosen.ranks}")
    path = chosen.record or usual
    about = records.circumstances(card, chosen.commit)
    names = chosen.part or [name for name, part in PARTS.items() if part.usual]
    done = [run_part(name, chosen, path, about, console) for name in names]
    if path is not None:
        console.print(f"record: {path}")
    return 0 if all(done) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no rank is left behind
    sys.exit(main())

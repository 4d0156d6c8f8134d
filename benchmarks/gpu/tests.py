"""The tests that need a GPU, part by part, with a record of what passed.

python -m benchmarks.gpu.tests                    # every part, the sanitizers last
python -m benchmarks.gpu.tests --part capture     # one part; the record keeps the others as they were
python -m benchmarks.gpu.tests --part list        # what the parts are, and about how long each takes
python -m benchmarks.gpu.tests --ranks 2          # those that 2 ranks run together, in tests/gpu/ranks

Each file in tests/gpu is a part; so are the GPU tests that stand in other files (elsewhere), and the sanitizers:
memcheck and racecheck on every schedule of the generator, memcheck on a block too. Where an optional package is not
installed, the part that needs it is left out; any other part that runs no test has failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.common import ROOT, command_parser
from benchmarks.gpu.contest.measure import Card
from benchmarks.gpu.record import records
from te_fuser.kernels.packages import cudnn_frontend, flash_attn_4, quack

LIMIT = 300  # seconds of a part
SANITIZER = "compute-sanitizer"
FOUND_ERRORS = 86  # its exit status then; none of pytest's
HANGS = 100  # seconds after which a test's stacks are printed
# Why tests of packages that te_fuser does not ask for are skipped.
NOT_INSTALLED = frozenset(f"needs {module.PACKAGE}" for module in (cudnn_frontend, flash_attn_4, quack))
SHOWN = 5  # failed tests of a part in the table; the record names all
_SCHEDULES = tuple(
    f"tests/gpu/test_generated_kernels.py::{test}" for test in ("test_every_schedule", "test_second_reads_through_l2")
)
_PACKED = tuple(
    f"tests/gpu/test_packed_heads.py::test_values_and_repeatability[{case}]"
    for case in ("bias in float32", "packed with sums", "packed, turned lines", "backward with sums in float32")
)
_TURNED = tuple(
    f"tests/gpu/test_rotary_by_angles.py::test_values_and_repeatability[{case}]"
    for case in (
        "tokens with starts",
        "normed, then turned, centered",
        "turned, then normed odd heads",
        "of many heads",
    )
)
_PLANS = "tests/gpu/test_cuda_kernels_in_plans.py"
_ALONE = (*_SCHEDULES, *_PACKED, *_TURNED, f"{_PLANS}::test_misaligned_inputs_and_parameters")  # no products
_BLOCKS = tuple(f"{_PLANS}::test_gpt_block[with dropout-{dtype}]" for dtype in ("float32", "bfloat16", "float16"))
# Tool -> tests. Of libraries' kernels racecheck says little that is true, so it has none of them.
SANITIZED: dict[str, tuple[str, ...]] = {"memcheck": (*_ALONE, *_BLOCKS), "racecheck": _ALONE}
# Seconds on an H200, about; what a record of this card has is better.
ABOUT = {
    "attention-in-plans": 40, "attention-structure": 300, "capture": 15, "cuda-kernels-in-plans": 40,
    "generated-kernels": 40, "matmul": 25, "matmul-fusions": 120, "packed-heads": 40, "rotary-by-angles": 60,
    "tune": 20, "elsewhere": 45, "memcheck": 240, "racecheck": 150,
}  # fmt: skip
USUAL = 20.0


class Missing(Exception):
    """Missing requirement of a part; the message says what to do."""


@dataclass(frozen=True)
class Part:
    """Some tests: arguments of pytest, and what runs it."""

    tests: tuple[str, ...]
    tool: str | None = None


@dataclass
class Counts:
    """Result of a part.

    Attributes:
        failures: the tests that failed, as pytest takes them.
        left_out: why all tests of a run were skipped, where nothing but optional packages is missing.
        problems: what is wrong beside failed tests.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """True if something ran and all of it passed."""
        return self.passed > 0 and not self.failed and not self.problems

    @property
    def absent(self) -> bool:
        """True if nothing ran, for want of an optional package alone."""
        return bool(self.left_out) and not (self.passed or self.failed or self.problems)


def parts(ranks: int = 1) -> dict[str, Part]:
    """Name -> what it runs; of several ranks what they run together."""
    if ranks > 1:
        together = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu/ranks").glob("test_*.py"))
        return {_name(path): Part((path,)) for path in together}
    files = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    found = {_name(path): Part((path,)) for path in files}
    elsewhere = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if _has_gpu_tests(path)]
    found["elsewhere"] = Part(tuple(path.relative_to(ROOT).as_posix() for path in elsewhere))
    return found | {tool: Part(tests, tool) for tool, tests in SANITIZED.items()}


def _name(path: str) -> str:
    return Path(path).stem.removeprefix("test_").replace("_", "-")


def _has_gpu_tests(path: Path) -> bool:
    return (
        ROOT / "tests/gpu" not in path.parents
        and re.search(r"^@pytest\.mark\.gpu$", path.read_text(), re.MULTILINE) is not None
    )


def estimates() -> dict[str, float]:
    """Part -> seconds, by the newest record of each."""
    found: dict[str, float] = {**dict.fromkeys(parts(), USUAL), **ABOUT}
    for path in sorted(records.RESULTS.glob("gpu-tests-*.json")):
        measured = {name: part["seconds"] for name, part in json.loads(path.read_text())["parts"].items()}
        found |= {name: seconds for name, seconds in measured.items() if name in found}
    return found


# -------------------------------------------------------------------------------------------------- running


def run(part: Part, limit: int = LIMIT) -> Counts:
    """Run a part's tests in a process of their own.

    Raises:
        Missing: without the sanitizer, if it is a sanitizer's part.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-q", "-m", "gpu", "-o", f"faulthandler_timeout={HANGS}", f"--junitxml={report}"]
        options += ["-o", "junit_family=xunit1"]  # with the tests' files
        start = time.perf_counter()
        try:
            command = [*prefix(part.tool), sys.executable, "-m", "pytest", *options, *part.tests]
            status = ended(command, part.tool, limit)
        except subprocess.TimeoutExpired:
            return Counts(seconds=float(limit), problems=[f"stopped after {limit} s: the log says where it hung"])
        seconds = time.perf_counter() - start
        counts = counted(report.read_text()) if report.exists() else Counts(problems=["pytest left no report"])
    counts.seconds = seconds
    counts.problems += problems(part, status, counts)
    return counts


def ended(command: Sequence[str], tool: str | None, limit: float = LIMIT) -> int:
    """The exit status of a command; with all that it started it is stopped after `limit` seconds.

    Raises:
        subprocess.TimeoutExpired: when it was stopped.
    """
    # A group of its own and not a session: what ends this command's session shall end its tests too.
    group: dict[str, Any] = {"process_group": 0} if sys.version_info >= (3, 11) else {"start_new_session": True}
    with subprocess.Popen(command, cwd=ROOT, env=environment(tool), **group) as process:
        try:
            return process.wait(limit)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # a sanitizer's own child too
            raise


def prefix(tool: str | None) -> list[str]:
    """Words before the command.

    Raises:
        Missing: when the sanitizer is not installed.
    """
    if tool is None:
        return []
    path = shutil.which(SANITIZER) or shutil.which(f"/usr/local/cuda/bin/{SANITIZER}")
    if path is None:
        raise Missing(
            f"{SANITIZER} is neither on the PATH nor in /usr/local/cuda/bin: it comes with the CUDA toolkit (package "
            "cuda-sanitizer); run the other parts without it by PART=<name>"
        )
    # Calls of the driver that fail, as libraries try things out, are no errors of kernels.
    return [path, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", str(FOUND_ERRORS)]


def environment(tool: str | None) -> dict[str, str]:
    """Under memcheck each tensor is an allocation of its own, so that a step beyond its end is seen."""
    return {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"} if tool == "memcheck" else dict(os.environ)


def counted(report: str) -> Counts:
    """Counts from pytest's JUnit report."""
    root = ElementTree.fromstring(report)
    suites, cases = list(root.iter("testsuite")), list(root.iter("testcase"))
    total, failed, errors, skipped = (
        sum(int(s.get(key, 0)) for s in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    counts = Counts(total - failed - errors - skipped, failed + errors, skipped)
    counts.failures = list(dict.fromkeys(_test_id(c) for c in cases if {"failure", "error"} & {e.tag for e in c}))
    counts.left_out = _not_installed(cases)
    return counts


def _test_id(case: ElementTree.Element) -> str:
    """file::test; the file alone where its tests could not be collected."""
    path, name = case.get("file", ""), case.get("name", "")
    return f"{path}::{name}" if case.get("classname") else path or name


def _not_installed(cases: Sequence[ElementTree.Element]) -> list[str]:
    """The reasons, if each test was skipped for want of an optional package."""
    reasons = [skip.get("message", "") for case in cases for skip in case.iter("skipped")]
    return sorted(set(reasons)) if len(reasons) == len(cases) and NOT_INSTALLED.issuperset(reasons) else []


def problems(part: Part, status: int, counts: Counts) -> list[str]:
    """Problems beside failed tests."""
    if status == FOUND_ERRORS:
        return [f"{part.tool} found errors: they stand above"]
    if not (counts.passed or counts.failed or counts.left_out):
        return ["no test ran"]
    if status not in (0, 1):
        return [f"the command ended with exit status {status}"]
    return []


# --------------------------------------------------------------------------------------------------- command


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = command_parser("benchmarks.gpu.tests", __doc__)
    parser.add_argument("--part", nargs="+", metavar="NAME", help=f"only these: {', '.join(parts())}; or list")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that run tests together (usual: 1)")
    parser.add_argument("--commit", help="what is tested, where the tree is no git repository")
    parser.add_argument("--limit", type=int, default=LIMIT, help=f"seconds of a part (usual: {LIMIT})")
    parser.add_argument("--record", type=Path, help="where to write (usual: results/gpu-tests-<name>.json)")
    found = parser.parse_args(arguments)
    known = parts(found.ranks)
    unknown = sorted(set(found.part or ()) - set(known) - {"list"})
    if unknown:
        parser.error(f"there is no part {', '.join(unknown)}; parts: {', '.join(known)}")
    return found


def table_of(found: Mapping[str, Counts]) -> Table:
    """The results for a terminal."""
    table = Table("part", box=None, pad_edge=False)
    for head in ("passed", "failed", "skipped", "seconds"):
        table.add_column(head, justify="right")
    table.add_column("problem")
    for name, c in found.items():
        cells = (str(c.passed), str(c.failed), str(c.skipped), f"{c.seconds:.0f}", escape("; ".join(_remarks(c))))
        table.add_row(name, *cells, style="" if c.good else "yellow" if c.absent else "red")
    return table


def _remarks(counts: Counts) -> list[str]:
    """Lines on failed tests, those left out, and other problems."""
    found = counts.failures[:SHOWN]
    more = len(counts.failures) - len(found)
    found += [f"and {more} more: the record names them"] if more else []
    return found + [f"left out: {reason}" for reason in counts.left_out] + counts.problems


def run_part(name: str, part: Part, limit: int = LIMIT) -> Counts:
    """A part's counts, whatever keeps it from running."""
    try:
        counts = run(part, limit)
    except Missing as missing:
        return Counts(problems=[str(missing)])
    if counts.seconds >= LIMIT:
        print(f"the part {name} took {counts.seconds:.0f} s; a part should end within {LIMIT} s", file=sys.stderr)
    return counts


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; the exit status is 0 if everything passed that needs no package that is missing."""
    chosen = parse(arguments)
    known = parts(chosen.ranks)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    if chosen.part == ["list"]:
        seconds = estimates()
        for name, part in known.items():
            tests = " ".join(part.tests)
            console.print(f"{name:<24} about {seconds.get(name, USUAL):3.0f} s  {tests}", soft_wrap=True, markup=False)
        return 0
    if not torch.cuda.is_available():
        console.print("the GPU tests need a CUDA device, and PyTorch sees none here; ./dev test runs the others")
        return 2
    card, found = Card(torch.device("cuda")), {}
    kind = "gpu-tests" if chosen.ranks == 1 else f"ranks-{chosen.ranks}-tests"
    path = chosen.record or records.record_path(card.name, kind)
    about = records.circumstances(card, chosen.commit)
    if chosen.ranks > 1:
        os.environ["RANKS"] = str(chosen.ranks)
        gpus, nccl = min(torch.cuda.device_count(), chosen.ranks), ".".join(map(str, torch.cuda.nccl.version()))
        shared = " over sockets, as ranks share GPUs: correctness alone" if gpus < chosen.ranks else ""
        about |= {"ranks": chosen.ranks, "gpus": gpus, "nccl": nccl + shared}
    for name in chosen.part or known:
        found[name] = run_part(name, known[name], chosen.limit)
        records.merge(path, name, {**about, **asdict(found[name])})
    console.print(table_of(found))
    console.print(f"record: {path}")
    return 0 if all(c.good or c.absent for c in found.values()) else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # so that no child is left behind
    sys.exit(main())

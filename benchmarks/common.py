"""Measuring rivals side by side: alternating rounds, medians and their spread, and records of what was measured."""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

RESULTS = ROOT / "benchmarks/results"
SHORT_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def command_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """Of a command that is called by its module's name; its description is printed as it stands."""
    raw = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(f"python -m {module}", description=description, formatter_class=raw)


# ------------------------------------------------------------------------------------------------ measuring

# A round counts if the process waited for a core for less than this share of its time: it ran as if alone.
_MOST_WAITING = 0.02
# Rounds that did not count are repeated, up to this many times as many as were asked for.
_PATIENCE = 3


@dataclass(frozen=True)
class Effort:
    """Length of a measurement.

    Attributes:
        rounds: how often each rival has its turn.
        turn: seconds that a turn lasts at least; a rival is called as often as that takes.
        warm_up: calls before the first round.
    """

    rounds: int = 11
    turn: float = 0.1
    warm_up: int = 3


@dataclass(frozen=True)
class Timing:
    """Seconds of one call: the median over the rounds, and the distance of the quartiles over the median."""

    seconds: float
    spread: float


@dataclass(frozen=True)
class Outcome:
    """Result of a contest.

    Attributes:
        timings: by rival.
        ratio: the second rival's time over the first's, the median over the rounds; each round compares turns that
            follow each other, so what changes slowly (clock, memory, neighbours) does not enter.
        ratio_spread: the distance of the quartiles of the rounds' ratios.
        rounds: how many count.
        waited: the largest share of a round's time in which the process waited for a core; None where the system
            does not say.
    """

    timings: Mapping[str, Timing]
    ratio: float
    ratio_spread: float
    rounds: int
    waited: float | None


@dataclass(frozen=True)
class _Round:
    seconds: tuple[float, ...]
    waited: float | None


def compete(
    rivals: Mapping[str, Callable[[], object]],
    effort: Effort,
    synchronize: Callable[[], object] = lambda: None,
) -> Outcome:
    """Call two rivals in turns.

    Args:
        rivals: what to call, by name; the first is the one to beat.
        synchronize: waits until everything that was called has been done, for a device that works behind the host.
    """
    calls = tuple(rivals.values())
    counts = [_calls_in_a_turn(call, effort, synchronize) for call in calls]
    rounds: list[_Round] = []
    for number in range(effort.rounds * _PATIENCE):
        rounds.append(_round(calls, counts, number, synchronize))
        if sum(map(_counts, rounds)) == effort.rounds:
            break
    undisturbed = [r for r in rounds if _counts(r)]
    # On a machine that is never quiet, the least disturbed rounds have to do; the outcome says how quiet they were.
    chosen = undisturbed if len(undisturbed) == effort.rounds else sorted(rounds, key=_waiting)[: effort.rounds]
    times = list(zip(*(r.seconds for r in chosen), strict=True))
    ratio = _timing([r.seconds[1] / r.seconds[0] for r in chosen])
    return Outcome(
        dict(zip(rivals, map(_timing, times), strict=True)),
        ratio.seconds,
        ratio.spread * ratio.seconds,
        len(chosen),
        max((r.waited for r in chosen if r.waited is not None), default=None),
    )


def _waiting(done: _Round) -> float:
    return done.waited or 0.0


def _counts(done: _Round) -> bool:
    return _waiting(done) < _MOST_WAITING


def _calls_in_a_turn(call: Callable[[], object], effort: Effort, synchronize: Callable[[], object]) -> int:
    for _ in range(effort.warm_up):
        call()
    return max(1, math.ceil(effort.turn / turn_seconds(call, 1, synchronize)))


def turn_seconds(call: Callable[[], object], count: int, synchronize: Callable[[], object]) -> float:
    """Seconds of one call, of `count` calls one after the other."""
    synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    return (time.perf_counter() - start) / count


def _round(
    calls: Sequence[Callable[[], object]], counts: Sequence[int], number: int, synchronize: Callable[[], object]
) -> _Round:
    """Everyone's turn; who begins changes from round to round."""
    seconds = [0.0] * len(calls)
    start, waited = time.perf_counter(), _waited_for_cores()
    for k in range(len(calls)):
        at = (k + number) % len(calls)
        seconds[at] = turn_seconds(calls[at], counts[at], synchronize)
    now = _waited_for_cores()
    share = None if waited is None or now is None else max(0.0, now - waited) / (time.perf_counter() - start)
    return _Round(tuple(seconds), share)


def _waited_for_cores() -> float | None:
    """Seconds in which threads of this process could have run but had no core; None where the system does not say."""
    try:
        tasks = [(task / "schedstat").read_text().split() for task in Path("/proc/self/task").iterdir()]
        return sum(int(waited) for _, waited, _ in tasks) * 1e-9
    except (OSError, ValueError):
        return None


def _timing(samples: Sequence[float]) -> Timing:
    median = statistics.median(samples)
    if len(samples) < 2:
        return Timing(median, 0.0)
    low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(median, (high - low) / median)


# -------------------------------------------------------------------------------------------------- records


def write_record(path: Path, cases: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> dict[str, Any]:
    """Write what was measured, on what and how, as JSON; also returns it."""
    record = {
        "written": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
        "command": command_line(),
        "options": dict(options),
        "cases": list(cases),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record


def as_data(outcome: Outcome) -> dict[str, Any]:
    """An outcome for a record."""
    return asdict(outcome)


def commit() -> str:
    """The commit that is checked out, with "+" after it when files of the package differ from it."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--", "te_fuser", "csrc", "benchmarks/*.py")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return name + ("+" if changed else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def machine() -> dict[str, Any]:
    """The processor, how many of its cores PyTorch uses, and the system."""
    return {
        "processor": _processor(),
        "abilities": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def command_line() -> str:
    """Command line of this program."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name.removesuffix(".__main__")] if module else sys.argv[:1]
    return without_folders(" ".join(["python", *program, *sys.argv[1:]]))


def without_folders(command: str) -> str:
    """A command with absolute paths cut down to their names: where somebody keeps files is nobody else's concern."""
    return " ".join(Path(word).name if word.startswith("/") else word for word in command.split(" "))


def versions() -> dict[str, str]:
    """Of what the numbers depend on."""
    import te_fuser

    return {"te_fuser": te_fuser.__version__, "torch": torch.__version__, "python": platform.python_version()}


# ------------------------------------------------------------------------------------------------ documents


def replace_between(path: Path, name: str, text: str) -> None:
    """Put text between the lines `<!-- begin name -->` and `<!-- end name -->` of a document.

    Raises:
        ValueError: when the document lacks these lines.
    """
    begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
    before, found_begin, rest = path.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise ValueError(f"{path} has no lines {begin} and {end}, between which the table belongs")
    path.write_text(f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}")


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]], words: int = 1) -> str:
    """Words in the first columns, numbers in the others."""
    lines = [header, [*["---"] * words, *["---:"] * (len(header) - words)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


__all__ = [
    "RESULTS",
    "ROOT",
    "SHORT_NAMES",
    "Effort",
    "Outcome",
    "Timing",
    "as_data",
    "command_line",
    "command_parser",
    "commit",
    "compete",
    "machine",
    "markdown_table",
    "replace_between",
    "turn_seconds",
    "versions",
    "without_folders",
    "write_record",
]

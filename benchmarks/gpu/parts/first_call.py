"""The part `first-call`: the first call in a new process, which `first_call_child.py` is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.child import output_of
from benchmarks.gpu.contest.entries import OURS, Entry
from benchmarks.gpu.contest.goals import Goal, judged
from benchmarks.gpu.parts.cases import OPTIONAL, WITHOUT

_MOST = {"empty cache": 10.0, "warm cache": 1.0}  # seconds


def first_call(bench: Bench) -> Iterator[Entry]:
    """The first forward and backward of the seed layer in a new process: eager, with an empty and a full cache.

    Where packages are installed that te_fuser does not ask for, it is also planned without them: importing them, and
    compiling what they bring, takes its time.
    """
    scale = bench.scale
    sizes = ["--tokens", str(scale.tokens), "--hidden", str(scale.hidden), "--positions", str(scale.positions)]
    sizes += ["--device", bench.device.type]
    contenders = {"eager": _in_child([*sizes, "--eager"])["times"]}
    optional = _add(contenders, OURS, sizes)
    if optional:
        _add(contenders, WITHOUT, [*sizes, "--without", *OPTIONAL])
    entry = {"case": "first call of the seed layer bf16 dropout 0.1", "contenders": contenders}
    plans = (OURS, WITHOUT) if optional else (OURS,)
    goals = [Goal("seconds", most, f"{name}, {cache}") for name in plans for cache, most in _MOST.items()]
    yield entry | {"goals": judged(goals, entry)}


def _add(contenders: dict[str, Any], name: str, arguments: Sequence[str]) -> bool:
    """Two processes over one folder; whether the plan has fusions of optional packages."""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for cache in _MOST:
            found = _in_child([*arguments, "--cache", folder], QUACK_CACHE_DIR=folder)
            contenders[f"{name}, {cache}"] = found["times"]
    return bool(found["optional"])


def _in_child(arguments: Sequence[str], **environment: str) -> dict[str, Any]:
    command = ["-m", "benchmarks.gpu.parts.first_call_child", *arguments]
    return json.loads(output_of(command, **environment).splitlines()[-1])

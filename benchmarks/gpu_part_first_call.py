"""The part `first-call`: the first call in a new process, which `gpu_first_call.py` is."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from gpu_bench import Bench
from gpu_child import output_of
from gpu_entries import OURS, Entry
from gpu_goals import Goal, judged


def first_call(bench: Bench) -> Iterator[Entry]:
    """The first forward and backward of the seed layer in a new process: eager, with an empty and a full cache."""
    scale = bench.scale
    sizes = ["--tokens", str(scale.tokens), "--hidden", str(scale.hidden), "--positions", str(scale.positions)]
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "eager": ["--eager"],
            f"{OURS}, empty cache": ["--cache", folder],
            f"{OURS}, warm cache": ["--cache", folder],
        }
        contenders = {name: _in_child([*sizes, "--device", bench.device.type, *more]) for name, more in runs.items()}
    entry = {"case": "first call of the seed layer bf16 dropout 0.1", "contenders": contenders}
    goals = (Goal("seconds", 10.0, f"{OURS}, empty cache"), Goal("seconds", 1.0, f"{OURS}, warm cache"))
    yield entry | {"goals": judged(goals, entry)}


def _in_child(arguments: Sequence[str]) -> dict[str, Any]:
    return json.loads(output_of(["benchmarks/gpu_first_call.py", *arguments]).splitlines()[-1])

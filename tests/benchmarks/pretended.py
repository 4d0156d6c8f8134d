"""Stand-ins for a GPU, its profiler and measurements on one, and commands in processes that have PyTorch at once."""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import ROOT
from benchmarks.gpu.contest import measure
from benchmarks.gpu.contest.bench import TOY as TOY_SCALE
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import compared
from benchmarks.gpu.contest.goals import judged, over_floor
from benchmarks.gpu.record import records
from tests.parallel.ranks import forking

CPU = measure.Card(torch.device("cpu"))
TOY = Bench(CPU, TOY_SCALE, measure.TRIAL, with_compile=False)


class PretendedGpu(measure.Card):
    """The CPU, asked as a GPU is."""

    is_gpu, name = True, "Pretended"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def joules(self) -> float:
        return 1.0

    def clock_mhz(self) -> int:
        return 1980


class PretendedEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded = True

    def elapsed_time(self, other: PretendedEvent) -> float:
        assert self.recorded and other.recorded
        return 1.0


class PretendedStream:
    def wait_stream(self, other: PretendedStream) -> None:
        assert isinstance(other, PretendedStream)


class PretendedGraph:
    def replay(self) -> None:
        pass


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> Mapping[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


class PretendedProfile:
    """Profiler whose trace has two kernels for each call."""

    def __init__(self, activities: object, acc_events: bool) -> None:
        pass

    def __enter__(self) -> PretendedProfile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        names = ("nvjet_hsh_128x256", "layer_norm_fwd") * measure._TRACED
        events = [event(name, 10.0 * k, 8.0) for k, name in enumerate(names)]
        Path(path).write_text(json.dumps({"traceEvents": events}))


def result(*seconds: float) -> measure.Result:
    return measure.Result(tuple(measure.Block(s, None, None) for s in seconds))


ABOUT = {
    "written": "2026-01-02T03:04:05+00:00", "gpu": "NVIDIA Test 1", "commit": "abc", "versions": {"torch": "2"},
    "command": "python -m benchmarks.gpu", "card": {"driver": "1"},
}  # fmt: skip


def layer_record() -> dict[str, Any]:
    results = {"floor": result(1.0), "eager": result(1.3), "te_fuser": result(1.1)}
    entry = compared("seed layer bf16 dropout 0.1", results)
    spent = {"products_ms": 8.0, "attention_ms": 1.0, "rest_ms": 0.5, "idle_ms": 0.25}
    entry["contenders"]["te_fuser"] |= spent
    row = {"direction": "forward", "step": "mat_mul", "ops": "MatMul", "moved_mib": 1.0, "predicted_ms": 1.0}
    entry["plan"] = [{**row, "measured_ms": 2.0, "limit": "products", "share": 0.5}]
    entry["goals"] = judged((over_floor(1.05),), entry)
    return records.part_record(ABOUT, measure.FULL, {"quick": False}, 12.34, [entry])


def forked(command: Sequence[str], **environment: str) -> str:
    """As `output_of`, in a process that has PyTorch at once."""
    with tempfile.NamedTemporaryFile("r") as out:
        process = forking().Process(target=_run, args=(command, environment, out.name))
        process.start()
        process.join()
        assert process.exitcode == 0, out.read()
        return out.read()


def _run(command: Sequence[str], environment: dict[str, str], out: str) -> None:
    os.environ.update(environment)
    os.chdir(ROOT)
    with open(out, "w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    torch.set_num_threads(1)
    sys.argv = [*command[command[0] == "-m" :]]
    sys.path.insert(0, str(ROOT / Path(sys.argv[0]).parent))
    if command[0] == "-m":
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()

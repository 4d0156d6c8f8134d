"""The command that measures on a GPU, without one: what it takes, and what it keeps where a part fails."""

from __future__ import annotations

import json
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_fuser
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.contest import child, measure
from benchmarks.gpu.contest.bench import TOY as TOY_SCALE
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import Entry, compared
from benchmarks.gpu.parts.table import PARTS, Part
from tests.benchmarks.forked import forked
from tests.benchmarks.pretended import PretendedGpu, result


def entries_then(outcome: Exception | None, count: int = 2) -> Part:
    def run(bench: Bench) -> Iterator[Entry]:
        for k in range(count):
            yield compared(f"case {k}", {"eager": result(1.0), "te_fuser": result(0.5)})
        if outcome is not None:
            raise outcome

    return Part("pretended", run, 1)


def test_a_part_that_fails_keeps_its_cases_and_the_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setitem(PARTS, "stack", entries_then(RuntimeError("an illegal memory access")))
    monkeypatch.setitem(PARTS, "glue", entries_then(RuntimeError("at once"), 0))
    monkeypatch.setitem(PARTS, "host", entries_then(None))
    assert command.main(["--toy", "--part", "stack", "glue", "host", "--record", str(path), "--commit", "abc"]) == 1
    parts = json.loads(path.read_text())["parts"]
    assert set(parts) == {"stack", "host"} and "problem" not in parts["host"]
    assert len(parts["stack"]["cases"]) == 2 and "an illegal memory access" in parts["stack"]["problem"]
    assert "at once" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_what_ends_the_process_leaves_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setitem(PARTS, "stack", entries_then(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        command.main(["--toy", "--part", "stack", "--record", str(path)])
    part = json.loads(path.read_text())["parts"]["stack"]
    assert len(part["cases"]) == 2 and part["problem"] == "not finished"


def test_a_part_stops_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(command, "LIMIT", 0)
    monkeypatch.setitem(PARTS, "stack", entries_then(None))
    assert command.main(["--toy", "--part", "stack", "--record", str(path)]) == 1
    part = json.loads(path.read_text())["parts"]["stack"]
    assert len(part["cases"]) == 1 and "should end within" in part["problem"]


def test_parts_on_a_gpu_begin_with_empty_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    folders = []
    for name in command.in_turn(("a", "b"), Bench(PretendedGpu(), TOY_SCALE, measure.TRIAL)):
        folders.append(te_fuser.config.cache_dir)
        assert name in "ab" and not list(te_fuser.config.cache_dir.iterdir())
        assert os.environ["XDG_CACHE_HOME"] == str(te_fuser.config.cache_dir)
    assert len(set(folders)) == 2


def test_a_child_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="failed:\nbefore"):
        child.output_of(["-c", "print('before'); raise SystemExit(3)"])
    monkeypatch.setattr(child, "CHILD_LIMIT", 0.5)
    with pytest.raises(RuntimeError, match="did not end within"):
        child.output_of(["-c", "import time; time.sleep(30)"])


@pytest.mark.slow
def test_the_command_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    arguments = ["--toy", "--part", "mlp", "--record", str(path), "--commit", "abc"]
    assert "te_fuser" in forked(["-m", "benchmarks.gpu", *arguments])
    arguments[2] = "host"
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", types.SimpleNamespace(name="benchmarks.gpu.__main__"))
    monkeypatch.setattr(sys, "argv", ["", *arguments])
    assert command.main(arguments) == 0
    record = json.loads(path.read_text())
    assert set(record["parts"]) == {"host", "mlp"} and record["commit"] == "abc" and record["gpu"] == "CPU"
    commands = [record["parts"][part]["command"] for part in ("mlp", "host")]
    assert commands[1] == record["command"] == commands[0].replace("mlp", "host")
    assert commands[0] == "python -m benchmarks.gpu --toy --part mlp --record record.json --commit abc"
    numbers = record["parts"]["mlp"]["cases"][0]["contenders"]["te_fuser"]
    assert {"ms", "over_floor", "over_eager", "over_best_rival", "kept_mib"} <= set(numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "speed"], "there is no part speed"),
        (["--quick", "--write-docs"], "whole run"),
        (["--rounds", "0"], "1 or more"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_both_commands_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="PyTorch sees none here; --toy"):
        command.main(["--part", "layer"])
    assert gpu_tests.main(["--part", "elsewhere"]) == 2
    assert "need a CUDA device" in capsys.readouterr().out

"""Commands that measure and test on a GPU, without one: what they take, count, name and leave out."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import te_fuser
from benchmarks.common import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.contest import child, measure
from benchmarks.gpu.contest.bench import TOY as TOY_SCALE
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import Entry, compared
from benchmarks.gpu.parts.table import PARTS, Part
from tests.benchmarks.pretended import PretendedGpu, forked, result
from tests.gpu.test_cuda_kernels_in_plans import DTYPES, name_of
from tests.kernels import test_qk_norm_rope as heads
from tests.kernels.packed_cases import CASES


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


# ---- tests of a GPU by parts


def test_parts_of_the_gpu_tests_name_tests_that_exist() -> None:
    parts = gpu_tests.parts()
    assert {"generated-kernels", "cuda-kernels-in-plans", "elsewhere", "memcheck", "racecheck"} <= set(parts)
    for part in parts.values():
        for test in part.tests:
            file, _, name = test.partition("[")[0].partition("::")
            assert (ROOT / file).is_file() and f"def {name}" in (ROOT / file).read_text()


def test_what_ranks_run_together_is_apart(capsys: pytest.CaptureFixture[str]) -> None:
    together = gpu_tests.parts(ranks=2)
    assert [*together] == [
        "consistency",
        "gone",
        "in-flight",
        "measuring",
        "peer-products",
        "presets",
        "regions",
        "training",
        "two-dimensions",
    ]
    alone = {test for part in gpu_tests.parts().values() for test in part.tests}
    assert not any("gpu/ranks" in test for test in alone)
    assert gpu_tests.main(["--ranks", "2", "--part", "list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [*together]


def test_lists_of_parts_say_how_long_each_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for main, names in ((command.main, PARTS), (gpu_tests.main, gpu_tests.parts())):
        assert main(["--part", "list"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split()[:2] for line in lines] == [[name, "about"] for name in names]
    assert all(0 < part.seconds <= command.LIMIT for part in PARTS.values())
    assert set(gpu_tests.ABOUT) <= set(gpu_tests.parts())


def test_the_sanitizers_cases_exist() -> None:
    cases = {test for tests in gpu_tests.SANITIZED.values() for test in tests if "[" in test}
    kernels = {case.name for case in (*CASES, *heads.CASES)}
    names = kernels | {f"with dropout-{name_of(dtype)}" for dtype in DTYPES}
    assert cases and {test.partition("[")[2].rstrip("]") for test in cases} <= names


def test_what_hangs_is_stopped_with_its_children(tmp_path: Path) -> None:
    child = f"import time; time.sleep(1); open({str(tmp_path / 'alive')!r}, 'w')"
    command = [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"]
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_tests.ended(command, None, limit=0.5)
    time.sleep(1.5)
    assert not (tmp_path / "alive").exists()
    assert gpu_tests.ended([sys.executable, "-c", "raise SystemExit(7)"], None) == 7


def test_counts_come_from_pytests_report() -> None:
    report = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    counts = gpu_tests.counted(report)
    assert (counts.passed, counts.failed, counts.skipped) == (3, 3, 3) and not counts.good


GPU_TESTS = """
import pytest
pytestmark = [pytest.mark.gpu, pytest.mark.skipif({missing!r} != "", reason={missing!r})]
@pytest.mark.parametrize("k", ["first", "bias in float32"])
def test_k(k):
    assert k == "first"
"""


FILE = "test_of_a_gpu.py"
QUACK = GPU_TESTS.format(missing="needs quack-kernels")
ANOTHER = "@pytest.mark.skipif(True, reason='needs two GPUs')\ndef test(): 0"
FOUND = {
    "one fails": (
        GPU_TESTS.format(missing=""),
        gpu_tests.Counts(passed=1, failed=1, failures=[f"{FILE}::test_k[bias in float32]"]),
    ),
    "package": (QUACK, gpu_tests.Counts(skipped=2, left_out=["needs quack-kernels"])),
    "package and another": (QUACK + ANOTHER, gpu_tests.Counts(skipped=3, problems=["no test ran"])),
    "none": ("def test_without_the_mark(): pass", gpu_tests.Counts(problems=["no test ran"])),
    "broken": (
        "import nothing_of_this_name",
        gpu_tests.Counts(failed=1, failures=[FILE], problems=["the command ended with exit status 2"]),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_part_names_what_failed_and_what_is_not_installed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (text, expected), path = FOUND[name], tmp_path / FILE
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take a second, and are not asked here
    path.write_text(text)
    counts = gpu_tests.run(gpu_tests.Part((str(path),)))
    counts.failures = [test.rpartition("/")[2] for test in counts.failures]  # folders: seen from the common one
    assert dataclasses.replace(counts, seconds=0.0) == expected


def test_what_is_not_installed_is_left_out_and_what_failed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [f"a.py::test_k[{k} in float32]" for k in range(7)]
    outcomes = {
        "capture": gpu_tests.Counts(passed=3),
        "quack-matmul": gpu_tests.Counts(skipped=9, left_out=["needs quack-kernels"]),
        "matmul": gpu_tests.Counts(passed=3, failed=7, failures=failures),
        "tune": gpu_tests.Counts(skipped=2, problems=["no test ran"]),
    }
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_tests, "Card", lambda device: PretendedGpu())
    monkeypatch.setattr(gpu_tests, "run_part", lambda name, chosen, limit: outcomes[name])
    path = tmp_path / "tests.json"

    def run(*parts: str) -> int:
        return gpu_tests.main(["--part", *parts, "--record", str(path), "--commit", "abc"])

    assert [run("capture", "quack-matmul"), run("quack-matmul"), run("matmul"), run("tune", "capture")] == [0, 0, 1, 1]
    out = capsys.readouterr().out
    assert "left out: needs quack-kernels" in out and "and 2 more: the record names them" in out
    assert failures[4] in out and failures[5] not in out  # brackets are no markup
    parts = json.loads(path.read_text())["parts"]
    assert parts["matmul"]["failures"] == failures and parts["quack-matmul"]["left_out"] == ["needs quack-kernels"]
    assert [row.style for row in gpu_tests.table_of(outcomes).rows] == ["", "yellow", "red", "red"]


def test_tests_of_optional_packages_give_the_reason_that_is_known() -> None:
    names = "attention_cudnn_frontend", "attention_flash_attn_4", "quack_float8", "quack_matmul"
    marks = [importlib.import_module(f"tests.gpu.test_{name}").pytestmark for name in names]
    assert {mark.kwargs["reason"] for mark in marks} == gpu_tests.NOT_INSTALLED
    assert len(gpu_tests.NOT_INSTALLED) == 3 and "needs quack-kernels" in gpu_tests.NOT_INSTALLED


@pytest.mark.parametrize(
    ("status", "counts", "problem"),
    [
        (0, gpu_tests.Counts(passed=1), None),
        (0, gpu_tests.Counts(skipped=4), "no test ran"),
        (0, gpu_tests.Counts(skipped=4, left_out=["needs quack-kernels"]), None),
        (3, gpu_tests.Counts(skipped=4, left_out=["needs quack-kernels"]), "exit status 3"),
        (gpu_tests.FOUND_ERRORS, gpu_tests.Counts(passed=1), "memcheck found errors"),
        (3, gpu_tests.Counts(passed=1), "exit status 3"),
    ],
)
def test_what_counts_as_a_problem(status: int, counts: gpu_tests.Counts, problem: str | None) -> None:
    found = gpu_tests.problems(gpu_tests.Part((), "memcheck"), status, counts)
    assert (not found) if problem is None else problem in found[0]


def test_a_missing_sanitizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests.shutil, "which", lambda name: None)
    counts = gpu_tests.run_part("memcheck", gpu_tests.parts()["memcheck"])
    assert not counts.good and "comes with the CUDA toolkit" in counts.problems[0]
    monkeypatch.setattr(gpu_tests.shutil, "which", lambda name: f"/bin/{name}")
    assert gpu_tests.prefix("racecheck")[:3] == ["/bin/compute-sanitizer", "--tool", "racecheck"]

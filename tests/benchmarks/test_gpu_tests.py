"""The command that runs the GPU's tests by parts, without a GPU: what it counts, names and leaves out."""

from __future__ import annotations

import dataclasses
import importlib
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.common import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.parts.table import PARTS
from tests.benchmarks.pretended import PretendedGpu
from tests.gpu.test_cuda_kernels_in_plans import DTYPES, name_of
from tests.kernels import test_qk_norm_rope as heads
from tests.kernels.packed_cases import CASES


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


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GPU_TESTS.format(missing=""),
            gpu_tests.Counts(passed=1, failed=1, failures=["test_of_a_gpu.py::test_k[bias in float32]"]),
        ),
        (
            GPU_TESTS.format(missing="needs quack-kernels"),
            gpu_tests.Counts(skipped=2, left_out=["needs quack-kernels"]),
        ),
        (
            GPU_TESTS.format(missing="needs quack-kernels")
            + "@pytest.mark.skipif(True, reason='needs two GPUs')\ndef test(): 0",
            gpu_tests.Counts(skipped=3, problems=["no test ran"]),
        ),
        ("def test_without_the_mark(): pass", gpu_tests.Counts(problems=["no test ran"])),
        (
            "import nothing_of_this_name",
            gpu_tests.Counts(
                failed=1, failures=["test_of_a_gpu.py"], problems=["the command ended with exit status 2"]
            ),
        ),
    ],
    ids=["one fails", "package", "package and another", "none", "broken"],
)
def test_a_part_names_what_failed_and_what_is_not_installed(
    text: str, expected: gpu_tests.Counts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # which take a second, and are not asked here
    path = tmp_path / "test_of_a_gpu.py"
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

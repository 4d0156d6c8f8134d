"""The commands for GPU benchmarks and GPU tests, without a GPU: toy sizes, records, tables, documents."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_floor  # noqa: E402
import gpu_measure  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_report  # noqa: E402
import gpu_rivals  # noqa: E402
import gpu_tests  # noqa: E402
import models  # noqa: E402

CPU = gpu_measure.Card(torch.device("cpu"))
TOY = gpu_parts.Bench(CPU, gpu_parts.TOY, gpu_measure.TRIAL, with_compile=False)


# ---------------------------------------------------------------------------------------------------- parts


SLOW = ("first-call", "train")  # they start processes
PARTS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in gpu_parts.PARTS]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs(name: str) -> None:
    entries = list(gpu_parts.PARTS[name].run(TOY))
    assert entries
    for entry in entries:
        assert len(entry["contenders"]) >= 2 and any(n.startswith("te_fuser") for n in entry["contenders"])
    header, rows = gpu_report.table_of(entries)
    assert all(len(row) == len(header) for row in rows) and rows[0][0] == entries[0]["case"]


@pytest.mark.slow
def test_the_command_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for part in ("mlp", "host"):
        command = ["benchmarks/gpu.py", "--toy", "--part", part, "--record", str(path), "--commit", "abc"]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "te_fuser" in done.stdout
    record = json.loads(path.read_text())
    assert set(record["parts"]) == {"host", "mlp"} and record["commit"] == "abc" and record["gpu"] == "CPU"
    assert "--part host" in record["command"] and "--part mlp" in record["parts"]["mlp"]["command"]
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
        gpu.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_both_commands_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="PyTorch sees none here; --toy"):
        gpu.main(["--part", "layer"])
    assert gpu_tests.main(["--part", "elsewhere"]) == 2
    assert "need a CUDA device" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- measuring


def test_contenders_take_turns_and_change_who_begins() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    results = gpu_measure.contest(steps, gpu_measure.TRIAL, CPU)
    assert calls[-6:] == ["a", "b", "c", "b", "c", "a"]
    assert all(len(r.blocks) == gpu_measure.TRIAL.rounds for r in results.values())


def result(*seconds: float) -> gpu_measure.Result:
    return gpu_measure.Result(tuple(gpu_measure.Block(s, None, None) for s in seconds))


def test_ratios_are_of_rounds() -> None:
    # The clock halves in the last two rounds: the ratio of the medians would be 1.6 / 2.
    assert result(0.8, 1.6, 1.6).over(result(1.0, 2.0, 2.0)) == pytest.approx(0.8)
    assert result(1.0, 3.0, 2.0).as_data()["range_ms"] == [1000.0, 3000.0]


def test_entries_know_the_best_rival_measured_or_earlier() -> None:
    case = "seed layer bf16 dropout 0.1"
    results = {"floor": result(1.0), "eager": result(1.3), "torch.compile": result(1.2), "te_fuser": result(1.1)}
    entry = gpu_parts.compared(case, results)
    earlier = 17.90 / 15.95
    assert entry["best_rival"] == gpu_rivals.TE and entry["earlier"]["over_floor"][gpu_rivals.TE] == earlier
    assert entry["contenders"]["te_fuser"]["over_best_rival"] == pytest.approx(1.1 / earlier)
    results[gpu_rivals.TE] = result(1.25)  # it is here: what it reached earlier does not count
    entry = gpu_parts.compared(case, results)
    assert entry["best_rival"] == "torch.compile" and "earlier" not in entry
    assert "over_best_rival" not in entry["contenders"]["eager"]


def test_earlier_runs_without_a_floor_go_by_eager() -> None:
    found = gpu_rivals.earlier_over_floor("LayerNorm-GELU MLP bf16", eager_over_floor=1.2)
    assert found[gpu_rivals.TE] == pytest.approx(10.01 / 10.26 * 1.2)
    assert gpu_rivals.earlier_over_floor("SwiGLU", 2.0)[gpu_rivals.LIGER] == pytest.approx(4247 / 4216)
    assert gpu_rivals.earlier_over_floor("something new", 1.0) == {}


def test_what_is_installed_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.SimpleNamespace(LayerNorm=torch.nn.LayerNorm)
    monkeypatch.setattr(gpu_rivals, "_imported", lambda name: library if name == "transformer_engine.pytorch" else None)
    found = gpu_rivals.installed("LayerNorm", 8, 0.0)
    assert list(found) == [gpu_rivals.TE] and found[gpu_rivals.TE].normalized_shape == (8,)
    assert gpu_rivals.installed("Llama layer", 8, 0.0) == {}


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> Mapping[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


def test_a_trace_counts_kernels_and_finds_products() -> None:
    events = [
        event("nvjet_tst_128x256", 0.0, 50.0),
        event("layer_norm_fwd", 50.0, 10.0),
        event("Memset (Device)", 60.0, 1.0, "gpu_memset"),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 61.0, 29.0),
        event("aten::mm", 0.0, 100.0, "cpu_op"),
    ]
    trace = gpu_measure.summarized(events, repeats=2)
    assert trace.kernels == 2 and trace.span == pytest.approx(45e-6)
    assert [trace.products, trace.attention, trace.rest] == pytest.approx([25e-6, 14.5e-6, 5.5e-6])
    assert trace.names["layer_norm_fwd"] == pytest.approx((0.5, 5e-6))
    assert trace.as_data()["over_own_products"] == pytest.approx(45 / 39.5)
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_measure.summarized(events[-1:], 1)


def test_kept_bytes_are_those_that_autograd_saves() -> None:
    x, weight = torch.randn(10, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)  # saves x and the weight
        return (y.exp() * y.view(30).view(10, 3)).sin()  # saves exp's result, y and a view of it, the product

    assert gpu_measure.kept_bytes(forward, [weight]) == 4 * (40 + 3 * 30)


# ---------------------------------------------------------------------------------------------------- floor


def test_the_floor_has_a_layers_products() -> None:
    attention = models.Attention(128, 16)
    work = gpu_floor.layer_work(attention, gpu_floor.gated_work)(32, 64)
    build = models.llama(attention)(32, 64)
    weights = [p.shape for p in build.eager.parameters() if p.dim() == 2]
    assert [(p.outputs, p.inputs) for p in work.products] == [tuple(s) for s in weights]
    floor = gpu_floor.make_floor(work.times(2), torch.float32, CPU)
    assert floor.taken == {"torch.mm": 2 * 3 * 4}


def test_products_have_the_shapes_of_a_linear_layer() -> None:
    y, dx, dw = (m() for m in gpu_floor.multiplications(gpu_floor.Product(5, 3, 7), torch.float32, CPU.device))
    assert (y.shape, dx.shape, dw.shape) == ((5, 7), (5, 3), (7, 3))


# ------------------------------------------------------------------------------------- records and documents

ABOUT = {
    "written": "2026-01-02T03:04:05+00:00", "gpu": "NVIDIA Test 1", "commit": "abc", "versions": {"torch": "2"},
    "command": "python benchmarks/gpu.py", "card": {"driver": "1"},
}  # fmt: skip


def layer_record() -> dict[str, Any]:
    results = {"floor": result(1.0), "eager": result(1.3), "te_fuser": result(1.1)}
    entry = gpu_parts.compared("seed layer bf16 dropout 0.1", results)
    spent = {"products_ms": 8.0, "attention_ms": 1.0, "rest_ms": 0.5, "idle_ms": 0.25}
    entry["contenders"]["te_fuser"] |= spent
    row = {"direction": "forward", "step": "mat_mul", "ops": "MatMul", "moved_mib": 1.0, "predicted_ms": 1.0}
    entry["plan"] = [{**row, "measured_ms": 2.0, "limit": "products", "share": 0.5}]
    return gpu_report.part_record(ABOUT, gpu_measure.FULL, False, 12.34, [entry])


def test_records_merge_by_part(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "gpu.json"
    gpu_report.merge(path, "mlp", {**layer_record(), "commit": "old"})
    gpu_report.merge(path, "layer", layer_record())
    gpu_report.merge(path, "mlp", {**layer_record(), "commit": "new", "seconds": 1.23456789})
    record = json.loads(path.read_text())
    assert list(record["parts"]) == ["layer", "mlp"] and record["commit"] == "new"
    assert '"rounds_ms": [1000.0],' in path.read_text()
    assert record["parts"]["layer"]["commit"] == "abc" and record["parts"]["mlp"]["seconds"] == 1.23457


def test_a_record_has_the_name_of_its_gpu() -> None:
    assert gpu_report.record_path("NVIDIA H200").name == "gpu-nvidia-h200.json"
    assert gpu_report.record_path("NVIDIA H200", "gpu-tests").name == "gpu-tests-nvidia-h200.json"


def test_documents_take_tables_and_plans(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin gpu {n} -->\n<!-- end gpu {n} -->\n" for n in ("layer", "plan", "time")))
    gpu_report.write_docs([{**ABOUT, "parts": {"layer": layer_record()}}], page)
    text = page.read_text()
    assert "| seed layer bf16 dropout 0.1 | floor | 1000.00" in text and "Transformer Engine (earlier)" in text
    assert "**NVIDIA Test 1** (driver 1); torch 2; commit abc, 2026-01-02; 5 rounds" in text
    assert "| te_fuser | 8.000 | 1.000 | 0.500 | 0.250 | 0.750 |" in text
    assert "| forward | `mat_mul` | MatMul | 1 | 1.000 | 2.000 | 100.0% | products 50% |" in text


def test_a_slow_copy_is_named() -> None:
    cases = [{"case": c, "contenders": {"copy": {"gbps": speed}}} for c, speed in (("a", 4200.0), ("b", 2700.0))]
    assert "slowly in b (2700 GB/s)" in gpu_report._slow_copies(cases)
    assert gpu_report._slow_copies(cases[:1]) == "" == gpu_report._slow_copies([layer_record()["cases"][0]])


def test_quick_runs_are_not_plotted(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    record = layer_record()
    record["options"]["quick"] = True
    gpu_report.plot({**ABOUT, "parts": {"layer": record}}, path)
    assert not path.exists()


def test_the_document_has_a_place_for_every_part() -> None:
    text = gpu_report.DOCUMENT.read_text()
    for name in (*gpu_parts.PARTS, "plan", "time"):
        assert f"<!-- begin gpu {name} -->" in text and f"<!-- end gpu {name} -->" in text


def test_the_plot_shows_every_contender(tmp_path: Path) -> None:
    path = tmp_path / "plot.svg"
    gpu_report.plot({**ABOUT, "parts": {"layer": layer_record()}}, path)
    text = path.read_text()
    for words in ("seed layer bf16 dropout 0.1", "te_fuser", "eager", "1.100", "(earlier)"):
        assert words in text


# -------------------------------------------------------------------------------------------- the GPU's tests


def test_parts_of_the_gpu_tests_name_tests_that_exist() -> None:
    parts = gpu_tests.parts()
    assert {"generated-kernels", "cuda-kernels-in-plans", "elsewhere", "sanitizer"} <= set(parts)
    for part in (p for members in parts.values() for p in members):
        for test in part.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).is_file() and f"def {name}" in (ROOT / file).read_text()


def test_counts_come_from_pytests_report() -> None:
    report = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    counts = gpu_tests.counted(report)
    assert (counts.passed, counts.failed, counts.skipped) == (3, 3, 3) and not counts.good


@pytest.mark.parametrize(
    ("status", "counts", "problem"),
    [
        (0, gpu_tests.Counts(passed=1), None),
        (0, gpu_tests.Counts(skipped=4), "no test ran"),
        (gpu_tests.FOUND_ERRORS, gpu_tests.Counts(passed=1), "memcheck found errors"),
        (3, gpu_tests.Counts(passed=1), "exit status 3"),
    ],
)
def test_what_counts_as_a_problem(status: int, counts: gpu_tests.Counts, problem: str | None) -> None:
    found = gpu_tests.problems(gpu_tests.Part((), "memcheck"), status, counts)
    assert (not found) if problem is None else problem in found[0]


def test_a_missing_sanitizer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_tests.shutil, "which", lambda name: None)
    counts = gpu_tests.run_part("sanitizer", gpu_tests.parts()["sanitizer"])
    assert not counts.good and "comes with the CUDA toolkit" in counts.problems[0]
    monkeypatch.setattr(gpu_tests.shutil, "which", lambda name: f"/bin/{name}")
    assert gpu_tests.prefix("racecheck")[:3] == ["/bin/compute-sanitizer", "--tool", "racecheck"]

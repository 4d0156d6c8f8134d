"""Records of a GPU, and the tables and the document that are made of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.parts.table import PARTS
from benchmarks.gpu.record import docs, records
from tests.benchmarks.pretended import ABOUT, layer_record


def test_records_merge_by_part(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "gpu.json"
    records.merge(path, "mlp", {**layer_record(), "commit": "old"})
    records.merge(path, "layer", layer_record())
    records.merge(path, "mlp", {**layer_record(), "commit": "new", "seconds": 1.23456789})
    record = json.loads(path.read_text())
    assert list(record["parts"]) == ["layer", "mlp"] and record["commit"] == "new"
    assert '"rounds_ms": [1000.0],' in path.read_text()
    assert record["parts"]["layer"]["commit"] == "abc" and record["parts"]["mlp"]["seconds"] == 1.23457


def test_a_document_says_how_many_rounds_there_were_whatever_was_asked_for() -> None:
    part = layer_record()
    assert part["options"]["rounds"] == 5
    assert " 1 round of blocks of 2 s or less;" in docs._section(part)
    part["cases"][0]["contenders"]["eager"]["rounds_ms"] *= 3
    part["options"]["quick"] = True
    assert " 1 to 3 rounds of blocks of 2 s or less (take it as a hint);" in docs._section(part)
    for data in part["cases"][0]["contenders"].values():
        del data["rounds_ms"]
    assert "rounds" not in docs._section(part)


def test_records_from_elsewhere_are_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    records.merge(records.record_path("NVIDIA Test 1"), "layer", layer_record())
    files = [tmp_path / "bench.json", tmp_path / "tests.json"]
    unfinished = {**layer_record(), "commit": "def", "problem": "not finished"}
    records.merge(files[0], "layer", unfinished)
    records.merge(files[0], "stack", unfinished)
    elsewhere = "python -m benchmarks.gpu --part mlp --record /some/where/bench.json"
    records.merge(files[0], "mlp", {**layer_record(), "commit": "def", "command": elsewhere})
    records.merge(files[1], "capture", {**ABOUT, "passed": 3, "seconds": 12.0})
    assert command.main(["--take-in", *map(str, files)]) == 0
    parts = json.loads((tmp_path / "results/gpu-nvidia-test-1.json").read_text())["parts"]
    assert {name: part["commit"] for name, part in parts.items()} == {"layer": "abc", "mlp": "def", "stack": "def"}
    assert parts["mlp"]["command"] == "python -m benchmarks.gpu --part mlp --record bench.json"
    tests = json.loads((tmp_path / "results/gpu-tests-nvidia-test-1.json").read_text())
    assert tests["parts"]["capture"]["passed"] == 3
    assert "gpu-tests-nvidia-test-1.json" in capsys.readouterr().out
    usual = {**dict.fromkeys(gpu_tests.parts(), gpu_tests.USUAL), **gpu_tests.ABOUT}
    assert gpu_tests.estimates() == {**usual, "capture": 12.0}


def test_a_record_has_the_name_of_its_gpu() -> None:
    assert records.record_path("NVIDIA H200").name == "gpu-nvidia-h200.json"
    assert records.record_path("NVIDIA H200", "gpu-tests").name == "gpu-tests-nvidia-h200.json"


def test_documents_take_tables_and_plans(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin gpu {n} -->\n<!-- end gpu {n} -->\n" for n in ("layer", "plan", "time")))
    docs.write_docs([{**ABOUT, "parts": {"layer": {**layer_record(), "problem": "a\nstopped"}}}], page)
    text = page.read_text()
    assert "seed layer bf16 dropout 0.1 (commit abc, full run):" in text
    assert "seed layer bf16 dropout 0.1 (commit abc, full run), ms:" in text
    assert "- seed layer bf16 dropout 0.1: te_fuser over floor 1.1 <= 1.05 (missed)" in text
    assert "not measured to its end: stopped" in text
    assert "| seed layer bf16 dropout 0.1 | floor | 1000.00" in text and "Transformer Engine (earlier)" in text
    assert "**NVIDIA Test 1** (driver 1); torch 2; commit abc, full run, 2026-01-02; 1 round of" in text
    assert "| te_fuser | 8.000 | 1.000 | 0.500 | 0.250 | 0.750 |" in text
    assert "| forward | `mat_mul` | MatMul | 1 | 1.000 | 2.000 | 100.0% | products 50% |" in text


def test_documents_are_of_benchmarks_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    records.merge(tmp_path / "gpu-test-1.json", "layer", layer_record())
    records.merge(tmp_path / "gpu-tests-test-1.json", "capture", {**ABOUT, "passed": 3, "seconds": 12.0})
    (tmp_path / "gpu-kernels-test-1.json").write_text('{"kernels": []}')
    (record,) = records.of_benchmarks()
    assert list(record["parts"]) == ["layer"]


def test_a_slow_copy_is_named() -> None:
    cases = [{"case": c, "contenders": {"copy": {"gbps": speed}}} for c, speed in (("a", 4200.0), ("b", 2700.0))]
    assert "slowly in b (2700 GB/s)" in docs._slow_copies(cases)
    assert docs._slow_copies(cases[:1]) == "" == docs._slow_copies([layer_record()["cases"][0]])


def test_the_document_has_a_place_for_every_part() -> None:
    text = docs.DOCUMENT.read_text()
    for name in (*PARTS, "plan", "time"):
        assert f"<!-- begin gpu {name} -->" in text and f"<!-- end gpu {name} -->" in text

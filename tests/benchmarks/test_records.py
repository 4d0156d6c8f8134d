"""Records of a GPU, the tables, documents and pictures made of them, and the distance between training runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import tests as gpu_tests
from benchmarks.gpu.contest import measure
from benchmarks.gpu.parts import train
from benchmarks.gpu.parts.table import PARTS
from benchmarks.gpu.record import docs, plots, records
from tests.benchmarks.pretended import ABOUT, TOY, layer_record


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


# ---- pictures


def growth_record() -> dict[str, Any]:
    entries = []
    for grows, tokens, hidden in (("tokens", 1024, 4096), ("tokens", 2048, 4096), ("hidden", 8192, 1000)):
        times = {"floor": 1.0, "eager": 1.5, "te_fuser": 1.25}
        contenders: dict[str, dict[str, float]] = {name: {"over_floor": time} for name, time in times.items()}
        contenders["eager"] |= {"peak_mib": 400.0, "kept_mib": 200.0}
        contenders["te_fuser"] |= {"peak_mib": 300.0, "kept_mib": 50.0}
        size = {"grows": grows, "tokens": tokens, "hidden": hidden}
        entries.append({"case": f"{tokens} x {hidden}", "contenders": contenders, **size})
    return records.part_record(ABOUT, measure.FULL, {"quick": False}, 12.34, entries)


def train_record(*more: str) -> dict[str, Any]:
    names = ("te_fuser", "torch.nn", *more)
    contenders = {
        name: {"training_losses": [[1, 5.0 + k], [4, 3.0], [7, 2.0]], "validation_losses": [2.5, 2.1]}
        for k, name in enumerate(names)
    }
    entry = {
        "case": "train_gpt.py", "contenders": contenders, "bigram_loss": 2.4, "settings": {"dropout": 0.25},
        "validation_steps": [4, 8],
    }  # fmt: skip
    return records.part_record(ABOUT, measure.FULL, {"quick": False}, 12.34, [entry])


def fp8_record() -> dict[str, Any]:
    part = train_record()
    entry = part["cases"][0]
    entry["contenders"] = {
        "te_fuser": entry["contenders"]["te_fuser"],
        "te_fuser, bfloat16": entry["contenders"]["torch.nn"],
    }
    return part


def whole_record() -> dict[str, Any]:
    exact = train_record("torch.nn, nudged")
    parts = {"layer": layer_record(), "growth": growth_record(), "train": train_record(), "train-exact": exact}
    parts["train-fp8"] = fp8_record()
    return {**ABOUT, "parts": parts}


def ranks_record() -> dict[str, Any]:
    kernels = [(0.0, 900.0, "products", "nvjet"), (900.0, 50.0, "rest", "layer_norm_fwd")]
    ways = {
        "NCCL": [(950.0, 170.0, "exchange", "ncclDevKernel")],
        "copy engines": [(400.0, 90.0, "exchange", "Memcpy")],
    }
    contenders = {name: {"events": [*kernels, *exchanges]} for name, exchanges in ways.items()}
    part = {"options": {"quick": False}, "ranks": 2, "cases": [{"case": "a step", "contenders": contenders}]}
    return {**ABOUT, "parts": {"timeline": part}}


def light_summary(record: dict[str, Any], path: Path) -> None:
    plots.plot_summary(record, [], path, dark=False)


PLOTS = {
    light_summary: (">GPT layer<", ">eager PyTorch<", ">te_fuser<", "1.10", "NVIDIA Test 1"),
    plots.plot_floor: (
        "seed layer bf16 dropout 0.1 (commit abc, full run)", "te_fuser", "eager", "1.100", "(earlier)",
    ),
    plots.plot_growth: (
        "NVIDIA Test 1 (commit abc, full run)", "time over the floor", ">eager<", ">te_fuser<", ">te_fuser, peak<",
        ">te_fuser, kept<", ">1k<", ">2k<", ">1000<", "tokens, 4096 features", "features, 8192 tokens",
    ),
    plots.plot_losses: (
        "dropout 0.25 (commit abc, full run)", "without dropout (commit abc, full run)", ">te_fuser<", ">eager<",
        ">eager, nudged<", "bigram model", "loss, nats per byte",
    ),
    plots.plot_timeline: (
        "on one of 2 ranks, NVIDIA Test 1", ">NCCL: 1.12 ms<", ">copy engines: 0.95 ms<", ">exchange<",
    ),
    plots.plot_fp8_losses: (
        "in FP8 and in bfloat16, NVIDIA Test 1 (commit abc, full run)", ">te_fuser<", ">te_fuser, bfloat16<",
        "bigram model", "minus bfloat16", ">step<",
    ),
}  # fmt: skip


@pytest.mark.parametrize("plot", PLOTS)
def test_a_plot_says_what_it_shows_and_repeats(plot: Callable[..., None], tmp_path: Path) -> None:
    paths = [tmp_path / "once.svg", tmp_path / "again.svg"]
    for path in paths:
        plot(ranks_record() if plot is plots.plot_timeline else whole_record(), path)
    text = paths[0].read_text()
    assert [words for words in PLOTS[plot] if words not in text] == []
    assert "<dc:date>" not in text and paths[0].read_bytes() == paths[1].read_bytes()


@pytest.mark.parametrize("plot", PLOTS)
def test_quick_runs_are_not_plotted(plot: Callable[..., None], tmp_path: Path) -> None:
    record = whole_record()
    record["parts"] |= ranks_record()["parts"]
    for part in record["parts"].values():
        part["options"]["quick"] = True
    for empty in (record, {**ABOUT, "parts": {}}):
        plot(empty, tmp_path / "plot.svg")
    assert not list(tmp_path.iterdir())


def test_growth_is_drawn_over_the_floor_and_over_eager() -> None:
    entries = growth_record()["cases"]
    assert [line[:2] for line in plots._ratios(entries)] == [("eager", [1.5] * 3), ("te_fuser", [1.25] * 3)]
    memory = [("te_fuser, peak", [0.75] * 3), ("te_fuser, kept", [0.25] * 3)]
    assert [line[:2] for line in plots._memory_ratios(entries)] == memory


def test_losses_of_records_without_validation_steps_are_curves_alone(tmp_path: Path) -> None:
    record = whole_record()
    sizes = []
    for _ in range(2):
        plots.plot_losses(record, tmp_path / "plot.svg")
        sizes.append((tmp_path / "plot.svg").stat().st_size)
        for name in ("train", "train-exact"):
            record["parts"][name]["cases"][0].pop("validation_steps", None)
    assert sizes[1] < sizes[0]


def test_every_plot_is_written_and_stands_in_the_document(tmp_path: Path) -> None:
    plots.write_plots(whole_record(), [ranks_record()], tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    summaries = ["summary-dark.svg", "summary-light.svg"]
    assert names == ["gpu-fp8-loss.svg", "gpu-growth.svg", "gpu-loss.svg", "gpu.svg", "ranks-timeline.svg", *summaries]
    for name in names:
        shown = (ROOT / "README.md").read_text() if name in summaries else docs.DOCUMENT.read_text()
        assert f"images/{name}" in shown
        assert (plots.IMAGES / name).stat().st_size < 2**20


# ---- training runs


def pretended_training(offsets: Mapping[str, float], steps: int, *, validated: int) -> Callable[[list[str]], str]:
    """Stand-in for the example: losses that lie `offsets` from 2, and validation losses every `validated` steps."""

    def train(arguments: list[str]) -> str:
        folder = Path(arguments[arguments.index("--out") + 1])
        speeds = {name: 100 if name == "torch.nn" else 150 for name in offsets}
        summary = {"tokens_per_second": speeds, "settings": {"text": "x"}, "bigram_loss": 2.4}
        (folder / "summary.json").write_text(json.dumps(summary))
        lines = ["step," + ",".join(f'"{n} {kind} loss"' for n in offsets for kind in ("training", "validation"))]
        for step in range(1, steps + 1):
            losses = (f"{2 + d:.5f},{'' if step % validated else f'{1 + d:.5f}'}" for d in offsets.values())
            lines.append(f"{step},{','.join(losses)}")
        (folder / "loss.csv").write_text("\n".join(lines))
        return ""

    return train


def test_the_difference_is_judged_over_what_a_nudge_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = {"te_fuser": 0.05, "torch.nn": 0.0, "torch.nn, nudged": -0.02}
    monkeypatch.setattr(train, "output_of", pretended_training(offsets, 119, validated=30))
    (entry,) = train.train_exact(TOY)
    assert entry["case"].endswith("--dropout 0 --steps 3 --nudge")
    assert entry["noise"] == pytest.approx(0.02) and entry["largest_difference"] == pytest.approx(0.05)
    ours = entry["contenders"]["te_fuser"]
    assert ours["difference_over_noise"] == pytest.approx(2.5) and ours["speed_up"] == 1.5
    assert [(goal["most"], goal["met"]) for goal in entry["goals"]] == [(2, False)]
    assert entry["validation_steps"] == [30, 60, 90] and ours["validation_losses"] == [1.05] * 3
    assert ours["training_losses"] == [[step, 2.05] for step in range(1, 120, 3)]  # 50 points at most


def test_the_compiled_twin_takes_part_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = {"te_fuser": 0.05, "torch.nn": 0.0, "torch.compile": 0.01}
    monkeypatch.setattr(train, "output_of", pretended_training(offsets, 30, validated=10))
    (entry,) = train.train(dataclasses.replace(TOY, with_compile=True))
    assert entry["case"].endswith("--steps 3 --compile")
    assert {name: d.get("speed_up") for name, d in entry["contenders"].items()} == {
        "te_fuser": 1.5, "torch.nn": None, "torch.compile": 1.5,
    }  # fmt: skip
    (entry,) = train.train(TOY)
    assert "torch.compile" not in entry["contenders"]


def test_fp8_is_judged_by_its_last_evaluations(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def run(arguments: list[str]) -> str:
        ran.append(arguments)
        off = 0.05 if arguments[-1] == "fp8" else 0.02
        return pretended_training({"te_fuser": off}, 40, validated=2)(arguments)

    monkeypatch.setattr(train, "output_of", run)
    (entry,) = train.train_fp8(TOY)
    both = [arguments[arguments.index("--out") + 2 :] for arguments in ran]
    assert both[0] == [*both[1], "--precision", "fp8"] and "--validations" in both[1]
    ours, other = entry["contenders"].values()
    assert ours["last_losses"] == pytest.approx(1.05) and other["last_losses"] == pytest.approx(1.02)
    assert entry["fp8_difference"] == pytest.approx(0.03) and len(entry["validation_steps"]) == 20
    assert [(goal["found"], goal["met"]) for goal in entry["goals"]] == [(pytest.approx(1.05 / 1.02), False)]
    assert "Mean of the last ten evaluations: 1.0500 nats in FP8, 1.0200 in bfloat16." in docs._note(entry)


def test_a_nudge_that_loses_its_way_in_the_digits_is_one_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = {"te_fuser": 0.0001, "torch.nn": 0.0, "torch.nn, nudged": 0.0}
    monkeypatch.setattr(train, "output_of", pretended_training(offsets, 5, validated=5))
    (entry,) = train.train_exact(TOY)
    assert entry["noise"] == 0 and entry["contenders"]["te_fuser"]["difference_over_noise"] == pytest.approx(10)


def test_losses_are_compared_beside_noise() -> None:
    names = ("te_fuser", "torch.nn", "torch.nn, nudged")
    rows = [{f"{n} training loss": str(2.0 + d) for n, d in zip(names, (0.01, 0.0, 0.1), strict=True)}] * 30
    assert train._largest_difference(rows, "te_fuser") == pytest.approx(0.01)
    assert train._largest_difference(rows, "torch.nn, nudged") == pytest.approx(0.1)
    rows[5] = {**rows[5], "te_fuser training loss": "3.0"}
    assert train._largest_difference(rows, "te_fuser") == pytest.approx((19 * 0.01 + 1.0) / 20)
    assert train._largest_difference(rows, "te_fuser", smoothed=1) == pytest.approx(1.0)


def test_the_note_on_training_says_how_far_the_losses_lie_apart() -> None:
    entry = {
        "contenders": {"te_fuser": {"speed_up": 1.9}, "torch.nn": {}, "torch.nn, nudged": {}},
        "largest_difference": 0.01, "late_difference": 0.005,
        "early_difference": 0.0001, "noise": 0.2, "bigram_loss": 2.4,
    }  # fmt: skip
    note = docs._note(entry)
    assert "differ by 0.0100 nats at most (0.005 in the second half), each of the first ten by 0.0001" in note
    assert "those of `torch.nn, nudged` differ from `torch.nn`'s by 0.2000" in note

"""The pictures of GPU records: what they show, that they repeat, and that the document has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common import ROOT
from benchmarks.gpu.contest import measure
from benchmarks.gpu.record import docs, plots, records
from tests.benchmarks.pretended import ABOUT, layer_record


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

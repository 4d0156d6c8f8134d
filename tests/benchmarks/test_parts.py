"""Measurements of the parts, in toy sizes and on a pretended GPU; nothing here looks at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import te_fuser
from benchmarks import models
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.contest import entries
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.parts import cases, first_call, glue, host, train
from benchmarks.gpu.parts.table import PARTS
from benchmarks.gpu.record import tables
from benchmarks.models import rivals
from tests import fake_cuda
from tests.benchmarks.pretended import ABOUT, TOY, forked
from tests.needs import needs_compiler

SLOW = ("first-call", "train", "train-exact", "train-fp8")  # they start processes


def assert_tabled(entries: list[dict[str, Any]]) -> None:
    """Check that entries fit one table."""
    assert entries
    for entry in entries:
        assert len(entry["contenders"]) >= 2 and any(n.startswith("te_fuser") for n in entry["contenders"])
    header, rows = tables.table_of(entries)
    assert all(len(row) == len(header) for row in rows) and rows[0][0] == entries[0]["case"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SLOW if name != "train"])  # the exact one trains the same, and more
def test_part_that_starts_processes_gives_a_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in (first_call, train):
        monkeypatch.setattr(part, "output_of", forked)
    monkeypatch.setattr(train, "EVALUATIONS", 3)
    assert_tabled(list(PARTS[name].run(TOY)))


@pytest.mark.parametrize("name", [name for name in PARTS if name not in SLOW])
def test_every_part_takes_the_paths_of_a_gpu(name: str, gpu_bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    writer = command.Writer(path, name, ABOUT, command.parse(["--toy"]), gpu_bench)
    assert command.run_part(writer, Console(quiet=True))
    part = json.loads(path.read_text())["parts"][name]
    assert "problem" not in part and part["options"]["compile"]
    assert_tabled(part["cases"])
    for entry in part["cases"]:
        ours = entry["contenders"]["te_fuser"]
        assert "left_out" not in entry and ours["joules"] == 0.0 and ours["mhz"] == 1980
    entries = part["cases"]
    without = ("stack", "growth", "presets", "cached")
    assert any("torch.compile" in e["contenders"] for e in entries) == (name not in without)
    if name in ("layer", "layer-fp16", "mlp", "llama", "stack"):
        for data in entries[0]["contenders"].values():
            assert data["order"] == [0, 1] and data["by_name"][1]["kernel"] == "layer_norm_fwd"
            assert data["by_name"][0]["count"] == 1 and data["kernels"] == 2
        assert entries[0]["contenders"]["te_fuser"]["peak_over_eager"] == 1.0
        assert entries[0]["contenders"]["floor"]["over_floor"] == 1.0 and entries[0]["goals"]
    if name == "host":
        graphed = [e["case"] for e in entries if "te_fuser cuda_graph" in e["contenders"]]
        assert graphed == [f"{m}, forward+backward" for m in ("LayerNorm + Linear + GELU + Linear", "Linear alone")]
        assert all(e["contenders"]["floor"]["over_floor"] == 1.0 for e in entries)
    if name == "small":
        assert [e["goals"][0]["most"] for e in entries if e["goals"]] == [1.05, 0.8, 0.85, 0.8, 1.0, 0.9]
        assert [e["case"].rpartition(", ")[2] for e in entries] == ["forward", "forward+backward"] * 5
    if name == "decoding":
        assert [e["case"] for e in entries] == [f"decoding, {rows} rows, 4 layers" for rows in (1, 3)]
        more = {"torch.compile", "torch.compile reduce-overhead", "te_fuser cuda_graph"}
        assert all(e["contenders"].keys() == {"eager", "te_fuser", *more} for e in entries)
    if name == "cached":
        assert all(e["contenders"].keys() == {"floor", "te_fuser", "te_fuser cuda_graph"} for e in entries)
        assert all(e["goals"] for e in entries)
    if name == "growth":
        assert {e["grows"] for e in entries} == {"tokens", "hidden"} and "floor" in entries[0]["contenders"]


def test_the_floor_of_a_call_makes_new_gradients_for_all_that_has_one(gpu_bench: Bench) -> None:
    torch.manual_seed(0)
    eager = rivals(gpu_bench.build(models.four_ops, 4, 8), torch.float32)["eager"]
    floor = host.idle(eager)
    y, made = floor.forward_and_backward(), [t.grad for t in (eager.x, *eager.model.parameters())]
    assert y.shape == eager.forward().shape and len(made) == 7
    assert [g.shape for g in made] == [t.shape for t in (eager.x, *eager.model.parameters())]


@needs_compiler
@pytest.mark.parametrize("name", ["mlp", "llama", "host"])
def test_parts_run_cuda_kernels(name: str, gpu_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their emulation on the CPU; where nothing is drawn, the part itself compares results with eager's."""
    emulation = fake_cuda.Emulation(tmp_path)
    with fake_cuda.in_place(fake_cuda.compile_driver()) as driver, emulation.in_plans():
        assert all("left_out" not in entry for entry in PARTS[name].run(gpu_bench))
        assert driver.launches > 50


def test_what_a_plan_has_competes_with_the_plan_without_it(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(name in te_fuser.fusions.names() for name in cases.OPTIONAL)
    monkeypatch.setattr(cases, "OPTIONAL", ("matmul_bias",))
    entry = next(PARTS["layer"].run(gpu_bench))
    ours = [name for name in entry["contenders"] if name.startswith("te_fuser")]
    assert ours == ["te_fuser", "te_fuser fast", "te_fuser lean", cases.WITHOUT]
    model, x = te_fuser.Sequential(te_fuser.ops.Linear(8, 8)), torch.randn(4, 8)
    planned: list[list[str]] = []
    monkeypatch.setattr(model, "forward", lambda x: planned.append([s.name for s in model.plan(x).forward]))
    model(x)
    cases._Without(model)(x)
    assert ["matmul_bias" in names for names in planned] == [True, False]


def test_a_rival_that_fails_is_left_out(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("no\n compiler")

    monkeypatch.setattr(torch, "compile", fails)
    for name in ("llama", "glue", "host"):
        entry = next(PARTS[name].run(gpu_bench))
        assert entry["left_out"] == {"torch.compile": "RuntimeError: no compiler"}
        assert "torch.compile" not in entry["contenders"] and "te_fuser" in entry["contenders"]


def test_times_stay_where_the_profiler_fails(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("the profiler saw no kernel")

    for module in (entries, glue):
        monkeypatch.setattr(module, "traced", fails)
    for name in ("llama", "glue", "stack"):
        entry = next(PARTS[name].run(gpu_bench))
        assert entry["left_out"] == {"kernels": "RuntimeError: the profiler saw no kernel"}
        assert entry["contenders"]["te_fuser"]["ms"] > 0 and "kernels" not in entry["contenders"]["te_fuser"]


def test_what_cannot_be_recorded_as_a_graph_is_left_out(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad and not torch.is_grad_enabled():
                raise RuntimeError("operation not permitted when stream is capturing")
            return x * 1.0

    monkeypatch.setattr(torch, "compile", lambda model: Refusing())
    forward, both = itertools.islice(PARTS["glue"].run(gpu_bench), 2)
    assert "not permitted" in forward["left_out"]["torch.compile"] and "left_out" not in both


def test_a_tuned_model_takes_part(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def tune(model: te_fuser.Sequential, x: torch.Tensor, **options: Any) -> str:
        calls.append(options)
        return "what was tried"

    monkeypatch.setattr(te_fuser.Sequential, "tune", tune)
    (entry,) = PARTS["llama"].run(dataclasses.replace(gpu_bench, tune=True))
    assert entry["tuning"] == "what was tried" and calls == [{"rounds": 3, "seconds": 0.1}]
    assert "over_best_rival" in entry["contenders"]["te_fuser tuned"]
    assert "what was tried" in tables.remarks([entry])


@pytest.mark.parametrize("optional", [True, False])
def test_first_calls_with_and_without_optional_packages(monkeypatch: pytest.MonkeyPatch, optional: bool) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def child(command: list[str], **environment: str) -> str:
        asked.append((command, environment))
        return "a library's own words\n" + json.dumps({"times": {"seconds": 2.0}, "optional": optional})

    monkeypatch.setattr(first_call, "output_of", child)
    (entry,) = first_call.first_call(TOY)
    plans = ["te_fuser", cases.WITHOUT] if optional else ["te_fuser"]
    assert list(entry["contenders"]) == ["eager", *(f"{p}, {c} cache" for p in plans for c in ("empty", "warm"))]
    assert [g["met"] for g in entry["goals"]] == [True, False] * len(plans)
    # Each plan begins with folders of its own, where its second process finds what the first one compiled.
    folders = [command[command.index("--cache") + 1] for command, _ in asked[1:]]
    assert folders[::2] == folders[1::2] and len(set(folders)) == len(plans)
    assert [environment for _, environment in asked[1:]] == [{"QUACK_CACHE_DIR": f} for f in folders]
    assert ["--without" in command for command, _ in asked] == [False] * 3 + [True, True] * (len(plans) - 1)


def test_a_model_that_is_not_converted_is_named_and_the_others_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(model: Any, **options: Any) -> Any:
        raise RuntimeError("no such luck")

    monkeypatch.setattr(te_fuser, "convert", convert)
    for entry in PARTS["converted"].run(TOY):
        assert entry["left_out"] == {"te_fuser": "RuntimeError: no such luck"}
        assert entry["contenders"].keys() == {"eager"} and entry["goals"] == []

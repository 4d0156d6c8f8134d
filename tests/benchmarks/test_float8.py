"""The benchmark of layers in FP8: its record, which is taken in, and the tables of the guides."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser as te
from benchmarks.common import ROOT
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import float8 as bench
from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.measure import TRIAL, Card
from benchmarks.gpu.record import float8, records


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of a run in tiny sizes."""
    folder = tmp_path_factory.mktemp("record")
    with pytest.MonkeyPatch.context() as patch:
        arguments = ["--toy", "--only", "mlp, LayerNorm", "--commit", "abc", "--record", str(folder)]
        patch.setattr(sys, "argv", ["float8.py", *arguments])
        bench.main()
    (found,) = folder.iterdir()
    return found


def test_a_record_says_on_what_and_how(written: Path) -> None:
    record = json.loads(written.read_text())
    assert written.name == "gpu-float8-cpu.json" and record["kind"] == "gpu-float8" and record["commit"] == "abc"
    assert {"gpu", "versions", "command", "written", "options", "seconds", "card"} <= record.keys()
    (entry,) = record["cases"]
    assert list(entry["contenders"]) == ["bfloat16", "fp8", "fp8, kept weights", "fp8, kept weights, lean"]
    for data in entry["contenders"].values():
        assert {"ms", "over_bfloat16", "host_ms", "host_over_bfloat16", "kept_mib"} <= data.keys()
    assert (
        entry["contenders"]["bfloat16"]["over_bfloat16"] == entry["contenders"]["bfloat16"]["host_over_bfloat16"] == 1
    )


class PretendedMLP(torch.nn.Sequential):
    """MLP that runs only in the region `within`."""

    within: Any = None

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__(torch.nn.Linear(hidden, inner), torch.nn.GELU(), torch.nn.Linear(inner, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert PretendedMLP.within.amax_history_len == 16
        return super().forward(x)  # type: ignore[no-any-return]


@contextlib.contextmanager
def pretended_region(enabled: bool, fp8_recipe: Any) -> Iterator[None]:
    PretendedMLP.within = fp8_recipe
    try:
        yield
    finally:
        PretendedMLP.within = None


@pytest.mark.parametrize("runs", [True, False])
def test_transformer_engine_takes_part_where_it_is_installed(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.SimpleNamespace(LayerNormMLP=PretendedMLP if runs else None, fp8_autocast=pretended_region)
    modules = {"transformer_engine.pytorch": package, "transformer_engine.common.recipe": te.recipe}
    monkeypatch.setattr(libraries, "_is_there", lambda name: name == "transformer_engine.pytorch")
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    card = Card(torch.device("cpu"))
    entry = bench.entry("mlp, LayerNorm, GELU", bench.CASES["mlp, LayerNorm, GELU"], (64, 64), card, TRIAL, ["fp8"])
    if not runs:
        assert entry["left_out"] == {"Transformer Engine": "TypeError: 'NoneType' object is not callable"}
        assert "Transformer Engine" not in entry["contenders"]
        return
    assert entry["contenders"]["Transformer Engine"]["ms"] > 0 and "left_out" not in entry
    judged = {(v["contender"], v["what"], v["most"]) for v in entry["goals"]}
    assert judged == {(way, "over_transformer_engine", 0.96) for way in (bench.FP8, bench.KEPT)}


def test_a_way_beside_the_products_by_one_scale_for_each_tensor() -> None:
    own, other = ({"products_ms": ms, "attention_ms": 1.0, "over_own_products": 1.2} for ms in (4.0, 5.0))
    assert bench.over_tensor_products(other, own) == {"over_tensor_products": pytest.approx(1.2 * 6 / 5)}
    assert bench.over_tensor_products(own, own) == {"over_tensor_products": pytest.approx(1.2)}
    assert bench.over_tensor_products({"ms": 1.0}, own) == bench.over_tensor_products(own, {}) == {}


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    ("said", "commands"),
    [
        ([], ["gpu", "gpu.float8"]),
        (["PART=layer"], ["gpu"]),
        (["PART=float8"], ["gpu.float8"]),
        (["RANKS=2"], ["gpu.ranks"]),
    ],
)
def test_make_measures_it_too(said: list[str], commands: list[str]) -> None:
    made = subprocess.run(["make", "-n", "gpu-bench", *said], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.findall(r"-m benchmarks\.(\S+)", made.stdout) == commands
    assert ("--record benchmarks/results" in made.stdout) == ("gpu.float8" in commands)


def of_a_gpu() -> dict[str, Any]:
    data = {"ms": 10.0, "over_bfloat16": 0.5, "kernels": 33.0, "over_own_products": 1.1, "joules": 5.0, "host_ms": 2.0}
    goals = [{"contender": "fp8", "what": "kernels", "most": 34, "found": 33.0, "met": True}]
    entry = {"case": "layer", "tokens": 8192, "hidden": 4096, "contenders": {"fp8": data}, "goals": goals}
    about = {
        "gpu": "NVIDIA Test 1",
        "written": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "versions": {"torch": "2"},
    }
    command = "python -m benchmarks.gpu.float8 --record /some/where"
    return {"kind": "gpu-float8", **about, "command": command, "options": {"quick": False}, "cases": [entry]}


def test_it_is_taken_in_and_goes_into_the_guides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guides = {name: tmp_path / f"{name}.md" for name in ("GUIDE", "QUICKSTART")}
    for name, path in guides.items():
        path.write_text("before\n<!-- begin gpu float8 -->\nold\n<!-- end gpu float8 -->\nbehind\n")
        monkeypatch.setattr(float8, name, path)
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    float8.write_docs()
    assert "old" in guides["GUIDE"].read_text()  # without a record nothing is written
    (tmp_path / "found.json").write_text(json.dumps(of_a_gpu()))
    assert command.main(["--take-in", str(tmp_path / "found.json")]) == 0
    taken = json.loads((tmp_path / "results" / "gpu-float8-nvidia-test-1.json").read_text())
    assert taken["command"] == "python -m benchmarks.gpu.float8 --record where"
    float8.write_docs()
    guide, quickstart = (path.read_text() for path in guides.values())
    assert "| layer | fp8 | 10.00 | 0.500 | 5.00 | 33 | 1.100 | 2.00 |" in guide and "kernels 33 <= 34" in guide
    assert "| layer | fp8 | 10.00 | 0.500 | 1.100 |" in quickstart and "old" not in guide + quickstart
    assert "commit abc, full run, 2026-01-02; `python -m benchmarks.gpu.float8 --record where`" in guide


def test_the_guides_have_the_record_that_lies_here() -> None:
    (record,) = records.RESULTS.glob("gpu-float8-*.json")
    short = [column for column in float8.COLUMNS if column.key in float8._SHORT]
    for path, columns in ((float8.GUIDE, float8.COLUMNS), (float8.QUICKSTART, short)):
        assert float8.table(json.loads(record.read_text())["cases"], columns) in path.read_text()

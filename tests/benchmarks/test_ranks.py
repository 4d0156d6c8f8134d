"""Measurements of several GPUs together, in toy sizes on CPUs; nothing here looks at a time."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import ranks as command
from benchmarks.gpu.contest import measure
from benchmarks.gpu.record import records, tables
from benchmarks.gpu.several import layer, timeline
from benchmarks.gpu.several.ranks import TOY, Ranks
from benchmarks.gpu.several.table import PARTS
from tests.parallel.conftest import ranks  # noqa: F401 - a fixture
from tests.parallel.ranks import on_ranks


def joined() -> Ranks:
    return Ranks.of_group(measure.Card(torch.device("cpu")), TOY, measure.TRIAL, with_compile=False)


@pytest.mark.parametrize("part", PARTS)
@on_ranks
def test_every_part_runs(part: str) -> None:
    lines: list[dict[str, Any]] = []
    entries = list(PARTS[part].run(joined(), lambda **line: lines.append(line)))
    header, rows = tables.table_of(entries)
    assert rows and all(len(row) == len(header) for row in rows)
    last = entries[-1]
    if part == "layer":
        whole, shared = entries
        rivals = {"Megatron style", "functional", "DTensor"}
        ours = {"te_fuser", "te_fuser lean", "te_fuser fast"}
        assert rivals | ours | {"floor"} <= shared["contenders"].keys() and not shared["left_out"]
        assert all(shared["contenders"][name]["error"] < 1e-4 for name in rivals | ours)
        kept = {name: whole["contenders"][name]["kept_mib"] for name in ("te_fuser", "te_fuser lean")}
        assert 0 < kept["te_fuser lean"] <= kept["te_fuser"]
        over_share = shared["contenders"]["te_fuser lean"]["kept_over_share"]
        assert 0.9 < over_share <= layer.MOST_KEPT, "what is measured is no view of what all ranks have"
        assert [goal["what"] for goal in shared["goals"]] == ["kept_over_share", "over_floor", "over_best_rival"]
        assert shared[layer.COMMUNICATION]["ms"] > 0 and {"preparing": "te_fuser"} in lines
    if part == "links":
        assert [len(e["contenders"]) for e in entries] == [3, 3, 3, 3]
        assert entries[0]["contenders"]["all-reduce"]["sent_bytes"] == entries[0]["bytes"]
        assert set(last["left_out"]) == {"copy engines", "copy engines beside products"}
    if part == "variants":
        llama, fp8 = entries
        ours = {"te_fuser", "te_fuser lean"}
        assert {"floor", "Megatron style", "functional"} | ours == llama["contenders"].keys() and not llama["left_out"]
        assert all(llama["contenders"][name]["error"] < 1e-4 for name in llama["contenders"].keys() - {"floor"})
        assert {goal["what"] for goal in llama["goals"]} == {"over_floor", "over_best_rival"}
        assert "over_bfloat16" in fp8["contenders"]["te_fuser fp8"]
    if part == "timeline":
        assert list(last["contenders"]) == [timeline.NCCL, timeline.COPIES]
        events = [
            {"ts": 5.0, "dur": 2.0, "name": n} for n in ("ncclDevKernel_AllGather", "Memcpy PtoP", "nvjet_h", "x")
        ]
        assert [kind for *_, kind, _ in timeline.shown(events)] == ["exchange", "exchange", "products", "rest"]
    if part == "data":
        assert len(last["contenders"]) == 6 and not last["left_out"] and len(last["goals"]) == 4
    if part == "train":
        ours = last["contenders"]["te_fuser"]
        assert ours["steps"] == 20 and ours["losses"][0] > 0 and last["goals"][0]["met"]
    if part == "parameters":
        assert "us_a_parameter" in last["contenders"]["te_fuser"]


@on_ranks
def test_what_fails_on_one_rank_is_left_out_on_all() -> None:
    here = joined()

    def fails() -> None:
        if dist.get_rank() == 1:
            raise RuntimeError("no\n compiler")

    made, reason = here.all_can(fails)
    assert made is None and reason == ("it failed on another rank", "RuntimeError: no compiler")[dist.get_rank()]
    assert here.all_can(lambda: 5) == (5, "")


@on_ranks
def test_a_tuned_model_takes_part() -> None:
    made = layer.makers(dataclasses.replace(joined(), tune=True))["te_fuser tuned"]()
    assert made.step().isfinite().all()


@on_ranks
def test_wrong_results_are_found() -> None:
    here = joined()
    want = layer.results(here, layer.alone(here, layer.rivals.layer(here)))
    made = layer.ours(here)
    assert layer.error(here, made, want) < 1e-4
    with torch.no_grad():
        next(made.model.parameters())[0] += 1.0
    assert layer.error(here, made, want) > 1e-3


@pytest.mark.slow
def test_the_command_starts_ranks_and_writes_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    assert command.main(["--toy", "--part", "parameters", "--record", str(path), "--commit", "abc"]) == 0
    part = json.loads(path.read_text())["parts"]["parameters"]
    assert part["ranks"] == 2 and part["nccl"] == "none: gloo" and part["commit"] == "abc" and part["options"]["quick"]
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    assert records.take_in(path).name == "ranks-2-cpu.json"


def test_what_ends_the_process_is_left_out_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run_ranks(count: int, arguments: list[str], limit: float) -> str:
        asked.append(arguments)
        out = Path(arguments[1])
        out.write_text('{"about": {"ranks": 2}}\n{"preparing": "functional, async TP"}\n')
        if "--without" not in arguments:
            return "rank 1 ended with exit status -11"
        with out.open("a") as file:
            file.write('{"preparing": ""}\n{"entry": {"case": "a"}}\n')
        return ""

    monkeypatch.setattr(command, "run_ranks", run_ranks)
    found = command.measure("layer", command.parse(["--toy"]))
    assert found == ([{"case": "a"}], {"ranks": 2}, "")
    assert asked[1][2:] == ["--toy", "--without", "functional, async TP"] and len(asked) == 2


def test_ranks_that_end_or_hang_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    started = command.subprocess.Popen

    def instead(text: str) -> None:
        def popen(arguments: list[str], **options: Any) -> Any:
            return started([arguments[0], "-c", text], **options)

        monkeypatch.setattr(command.subprocess, "Popen", popen)

    monkeypatch.setattr(command, "GRACE", 0.1)
    instead("import os, sys, time; sys.exit(7) if os.environ['RANK'] == '1' else time.sleep(60)")
    assert command.run_ranks(2, [], limit=30.0) == "rank 1 ended with exit status 7"  # not after the others
    instead("import time; time.sleep(60)")
    assert command.run_ranks(2, [], limit=0.2) == "stopped after 0 s"
    instead("import os; assert os.environ['TORCH_SYMM_MEM_DISABLE_MULTICAST'] == '1'")
    assert command.run_ranks(2, []) == ""


def test_bad_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in ((["--ranks", "1"], "must be 2 or more, got 1"), (["--part", "x"], "there is no part x")):
        with pytest.raises(SystemExit):
            command.parse(arguments)
        assert words in capsys.readouterr().err
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="--ranks 2 needs 2 GPUs, and PyTorch sees 0 here"):
            command.main([])
    assert command.main(["--part", "list"]) == 0
    assert [name for name, part in PARTS.items() if not part.usual] == ["train"]

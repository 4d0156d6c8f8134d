"""The benchmark's command in the smallest sizes, and how it measures; nothing here looks at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import common, cpu, models, presets
from tests.benchmarks.forked import forked


def test_command_measures_and_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    command = ["-m", "benchmarks.cpu", "--quick", "--threads", "1", "--record", str(path)]
    command += ["--case", "host", "swiglu", "--size", "8x16"]
    assert "host 8x16 fp32 forward+backward" in forked(command)
    record = json.loads(path.read_text())
    assert record["machine"]["threads"] == 1 and record["versions"]["torch"] == torch.__version__
    assert record["command"].startswith("python -m benchmarks.cpu --quick --threads 1 --record record.json")
    assert record["command"].endswith("--size 8x16") and record["commit"]
    assert len(record["cases"]) == 2 + 4  # directions x dtypes
    for case in record["cases"]:
        assert set(case["timings"]) == {"eager", "te_fuser"} and case["ratio"] > 0 and case["rounds"] == 3


def test_documents_take_full_runs_only(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu.parse(["--write-docs", "--quick"])
    assert "full run" in capsys.readouterr().err


@pytest.mark.parametrize("family", cpu.FAMILIES, ids=lambda f: f.name)
def test_both_of_a_pair_are_the_same_model(family: cpu.Family) -> None:
    pair = family.build(8, 16, kernels="reference")
    ours, theirs = ([p.shape for p in m.parameters()] for m in (pair.fused, pair.eager))
    assert ours == theirs
    case = cpu.Case(family, 8, 16, torch.float32, "forward")
    found = cpu.rivals(case, {"kernels": "reference"})  # compares the results, where nothing is drawn
    assert {name: r.forward().shape for name, r in found.items()}["te_fuser"] == found["te_fuser"].dy.shape


def test_a_wrong_model_is_found() -> None:
    def wrong(tokens: int, hidden: int, **options: object) -> models.Pair:
        pair = models.swiglu(tokens, hidden, **options)
        return models.Pair(torch.nn.GLU(), pair.fused, pair.shape)

    case = cpu.Case(cpu.Family("wrong", wrong, ((8, 16),), 1.0), 8, 16, torch.float32, "forward")
    with pytest.raises(RuntimeError, match="output of te_fuser differs"):
        cpu.rivals(case, {"kernels": "reference"})


def test_rivals_take_turns_and_change_who_begins() -> None:
    calls: list[str] = []
    rivals = {name: lambda name=name: calls.append(name) for name in ("a", "b")}
    outcome = common.compete(rivals, common.Effort(rounds=2, turn=0.0, warm_up=1))
    assert calls[:4] == ["a", "a", "b", "b"]  # warm-up, and one call to see how long it takes
    assert calls[4:8] == ["a", "b", "b", "a"]
    assert outcome.rounds == 2 and set(outcome.timings) == {"a", "b"}


def test_text_goes_between_the_marks(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text("# Head\n<!-- begin table -->\nold\n<!-- end table -->\ntail\n")
    table = common.markdown_table(("case", "ms"), [("a", "1.0")])
    common.replace_between(path, "table", table)
    text = "# Head\n<!-- begin table -->\n\n| case | ms |\n| --- | ---: |\n| a | 1.0 |\n\n<!-- end table -->\ntail\n"
    assert path.read_text() == text
    with pytest.raises(ValueError, match="begin other"):
        common.replace_between(path, "other", table)


@pytest.mark.parametrize("twins", presets.TWINS, ids=lambda t: t.name)
def test_a_preset_and_the_list_beside_it_are_the_same_model(twins: presets.Twins) -> None:
    found = twins.build(8, 16, torch.float32, {"kernels": "reference"}, ("list", "preset"))  # compares the results
    ours, theirs = (rival.forward() for rival in found.values())
    torch.testing.assert_close(ours, theirs)


def test_presets_are_measured_in_both_directions() -> None:
    sizes = presets.Sizes(4, 8, common.Effort(rounds=1, turn=0.0, warm_up=1))
    entries = list(presets.measured(sizes, {"kernels": "reference"}))
    assert len(entries) == 2 * len(presets.TWINS)
    for entry in entries:
        assert set(entry["measured"]) == {"list us", "preset us"} and entry["goal"] > 1.0

"""The benchmark of a CPU in the smallest sizes, the arithmetic of many GPUs, and imports among folders."""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import common, cpu, models, presets, scaling
from benchmarks.common import ROOT
from benchmarks.scaling import DDP, FSDP, HIDDEN, PARAMETERS, SEQUENCE, TOKENS, Facts, Job
from tests.benchmarks.pretended import forked


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


# ---- steps on many GPUs, on numbers that are easily reckoned


BYTES = TOKENS * HIDDEN * 2
FACTS = Facts(
    layer=1e-3, kept=1e9, rates={2: 1e11, 4: 2e11}, latency=1e-5, shown={2: 0.5}, shown_data={DDP: 0.5, FSDP: 0.25},
    network=1e10,
)  # fmt: skip
JOB = Job(layers=2, tokens=16 * SEQUENCE)


def test_one_gpu_runs_its_layers_and_nothing_else() -> None:
    (alone,) = (way for way in scaling.ways(FACTS, JOB, 1) if way.wrapper == DDP)
    assert (alone.dp, alone.tp, alone.shared, alone.data) == (1, 1, 0.0, 0.0)
    assert alone.seconds == pytest.approx(2 * 1e-3 * 4) and alone.efficiency == pytest.approx(1.0)


def test_a_collective_takes_latency_and_bytes() -> None:
    assert scaling.collective(FACTS, 1, TOKENS) == 0.0
    assert scaling.collective(FACTS, 2, TOKENS) == pytest.approx(1e-5 + BYTES / 2 / 1e11)
    assert scaling.collective(FACTS, 8, TOKENS) == pytest.approx(1e-5 + BYTES * 7 / 8 / 2e11)  # as on four


def test_shared_layers_show_a_part_of_their_collectives() -> None:
    way = scaling.predict(FACTS, JOB, 1, 2, DDP)
    assert way is not None and way.micro == 16 and way.layers == pytest.approx(4e-3)
    assert way.shared == pytest.approx(2 * 8 * 0.5 * scaling.collective(FACTS, 2, 16 * SEQUENCE))
    assert way.efficiency == pytest.approx(4e-3 / way.seconds)


def test_sums_of_gradients_within_a_machine_and_beyond() -> None:
    weights, log = 2 * PARAMETERS * 2, 2 * 2 * 1e-5
    within = scaling.sums(FACTS, JOB, 8, 1, DDP)
    assert within == pytest.approx(2 * 7 / 8 * weights / 2e11 + 3 * log)
    beyond = scaling.sums(FACTS, JOB, 16, 1, DDP)
    assert beyond == pytest.approx(2 * 15 / 16 * weights / 8e10 + 4 * log)  # eight adapters
    parted = scaling.sums(FACTS, JOB, 2, 8, FSDP)
    assert parted == pytest.approx(3 * 1 / 2 * weights / 8 / 1e10 + 3 * 2 * 1e-5)  # one adapter, an eighth each
    assert scaling.sums(FACTS, JOB, 1, 8, DDP) == 0.0


def test_what_backward_cannot_hide_shows() -> None:
    slow = dataclasses.replace(FACTS, network=1e8)
    way = scaling.predict(slow, JOB, 16, 1, DDP)
    assert way is not None
    sent = scaling.sums(slow, JOB, 16, 1, DDP)
    assert way.data == pytest.approx(sent - 2 / 3 * way.layers) and way.data > 0.5 * sent
    fast = scaling.predict(FACTS, JOB, 2, 1, DDP)
    assert fast is not None and fast.data == pytest.approx(0.5 * scaling.sums(FACTS, JOB, 2, 1, DDP))


def test_memory_takes_micro_batches_and_refuses() -> None:
    kept = dataclasses.replace(FACTS, kept=0.9 * scaling.MEMORY)  # of a layer for 8192 tokens
    way = scaling.predict(kept, JOB, 1, 1, DDP)
    assert way is not None and way.micro == 2  # of its 16 sequences, 0.225 of the memory each for either layer
    assert scaling.predict(dataclasses.replace(FACTS, kept=4 * scaling.MEMORY), JOB, 1, 1, DDP) is None
    shared = scaling.predict(dataclasses.replace(FACTS, kept=4 * scaling.MEMORY), JOB, 1, 4, DDP)
    assert shared is not None and shared.micro == 1
    large = Job(layers=60, tokens=16 * SEQUENCE)  # 12 billion parameters: 193 GB
    assert scaling.predict(FACTS, large, 8, 1, DDP) is None and scaling.predict(FACTS, large, 8, 1, FSDP) is not None


def test_more_gpus_than_sequences_share_layers() -> None:
    assert scaling.predict(FACTS, JOB, 32, 1, DDP) is None
    assert {way.tp for way in scaling.ways(FACTS, JOB, 32)} == {2, 4, 8}
    assert scaling.ways(FACTS, JOB, 1024) == []
    ((gpus, way, *_),) = scaling.rows(FACTS, JOB, [1024])
    assert (gpus, way) == ("1,024", "does not fit")


def test_the_fastest_way_comes_first_and_uneven_batches_cost() -> None:
    found = scaling.ways(FACTS, JOB, 8)
    assert [way.seconds for way in found] == sorted(way.seconds for way in found)
    even, uneven = scaling.predict(FACTS, JOB, 8, 1, DDP), scaling.predict(FACTS, JOB, 9, 1, DDP)
    assert even is not None and uneven is not None and uneven.layers == even.layers  # someone has two sequences


def ranks_record() -> dict[str, Any]:
    def ms(value: float, **more: Any) -> dict[str, Any]:
        return {"ms": value, **more}

    links = [
        {"case": "128 x 4096", "bytes": BYTES // 64, "contenders": {"all-gather": ms(0.03)}},
        {"case": "eight of 8192 x 4096", "contenders": {"NCCL": ms(1.3, gbps=200.0)}},
    ]
    shared = {"case": "shared", "contenders": {"te_fuser": ms(9.0)}, "collectives alone": ms(2.0)}
    layer = [{"case": "one", "contenders": {"te_fuser": ms(16.0)}}, shared]
    wrapped = {f"te_fuser {name}": ms(value) for name, value in (("alone", 70.0), ("DDP", 72.0), ("FSDP2", 73.0))}
    parts = {"links": links, "layer": layer, "data": [{"case": "four", "contenders": wrapped}]}
    return {"parts": {name: {"commit": "abc", "cases": cases} for name, cases in parts.items()}}


def test_numbers_are_those_of_records_and_say_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="make gpu-bench PART=layer"):
        scaling.facts_of(tmp_path)
    ours = {"te_fuser": {"ms": 16.0, "kept_mib": 641.0}}
    whole = {
        "parts": {"layer": {"commit": "def", "cases": [{"case": "seed layer bf16 dropout 0", "contenders": ours}]}}
    }
    (tmp_path / "gpu-nvidia-h200.json").write_text(json.dumps(whole))
    before = scaling.facts_of(tmp_path)
    assert before.rates == {2: 204e9, 4: 264e9} and before.shown == {2: pytest.approx(0.63)}
    sent = 2 * 3 / 4 * 4 * PARAMETERS * 2 / 264e9
    assert before.shown_data[DDP] == pytest.approx(8.5e-3 / sent)
    assert scaling.EARLIER in before.sources["rate on 2"] and "assumed" in before.sources["shown"]
    (tmp_path / "ranks-2-nvidia-h200.json").write_text(json.dumps(ranks_record()))
    facts = scaling.facts_of(tmp_path)
    assert facts.layer == pytest.approx(0.016) and facts.kept == 641 * 2**20
    assert facts.rates == {2: 200e9, 4: 264e9} and facts.latency == pytest.approx(3e-5)
    assert facts.shown == {2: pytest.approx(0.5)}  # (9 - 16 / 2) / 2
    assert facts.shown_data[FSDP] == pytest.approx(3e-3 / (3 / 2 * 4 * PARAMETERS * 2 / 200e9))
    words = " ".join(facts.sources.values())
    assert (
        words.count("record of abc") == 5 and "record of def" in words and scaling.EARLIER in facts.sources["rate on 4"]
    )


def test_the_page_is_what_the_records_say(tmp_path: Path) -> None:
    page = tmp_path / "scaling.md"
    page.write_text(scaling.PAGE.read_text())
    scaling.write_docs(page)
    assert page.read_text() == scaling.PAGE.read_text(), "run python -m benchmarks.scaling --write-docs"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.main(["--gpus", "64", "--tokens", "1048576"]) == 0
    out = capsys.readouterr().out
    assert "| 64 |" in out and "Assumed:" in out and "1,048,576 tokens a step" in out
    for arguments, words in ((["--tokens", "5"], "--tokens must be 2048"), (["--gpus", "0"], "--gpus must be 1")):
        with pytest.raises(SystemExit):
            scaling.main(arguments)
        assert words in capsys.readouterr().err


# ---- imports


FILES = sorted((ROOT / "benchmarks").rglob("*.py"))
# Modules that all share, and each folder -> those that it may import beside itself.
SHARED = {"benchmarks", "benchmarks.common", "benchmarks.models", "benchmarks.presets"}
ROOMS = {"contest": set(), "parts": {"contest"}, "record": {"contest"}, "several": {"contest", "parts"}}


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path) -> Iterator[str]:
    """The modules of benchmarks that a file imports."""
    known = {module_of(file) for file in FILES}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "benchmarks":
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from (whole & known) or {str(node.module)}


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_know_each_other_one_way(room: str) -> None:
    allowed = {room, *ROOMS[room]}
    for path in sorted((ROOT / "benchmarks/gpu" / room).glob("*.py")):
        others = [name for name in imports(path) if name not in SHARED and name.split(".")[2] not in allowed]
        assert others == [], f"{module_of(path)} may know {sorted(allowed)}"


def test_what_all_share_knows_no_gpu() -> None:
    for name in SHARED - {"benchmarks"}:
        assert set(imports(ROOT / f"{name.replace('.', '/')}.py")) <= SHARED


def test_no_circle_of_modules() -> None:
    TopologicalSorter({module_of(path): set(imports(path)) for path in FILES}).prepare()


def test_packages_import_nothing() -> None:
    """A first call in a new process takes the time of its imports: none may come before its clock starts."""
    assert [path for path in FILES if path.name == "__init__.py" and path.read_text()] == []

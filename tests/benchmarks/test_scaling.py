"""The arithmetic of steps on many GPUs, on numbers that are easily reckoned."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import scaling
from benchmarks.scaling import DDP, FSDP, HIDDEN, PARAMETERS, SEQUENCE, TOKENS, Facts, Job

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

"""Distance between two training runs, and the sentence about it in the document."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from benchmarks.gpu.parts import train
from benchmarks.gpu.record import docs
from tests.benchmarks.pretended import TOY


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

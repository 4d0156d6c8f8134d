"""The main job: it learns, goes on exactly where it stopped, and says what is wrong with its arguments."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import checkpoint  # noqa: E402
import gpt  # noqa: E402
import settings  # noqa: E402
import text  # noqa: E402
import train_gpt  # noqa: E402
import trainer  # noqa: E402
import twin  # noqa: E402

TINY = ["--layers", "1", "--hidden", "32", "--heads", "2", "--context", "16", "--batch", "4", "--dropout", "0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little text that is easily learned, in as many files as it takes to have both splits."""
    folder = tmp_path_factory.mktemp("text")
    for k in range(40):
        body = f"def function_{k}(argument):\n    return argument + {k}\n\n"
        (folder / f"module_{k}.py").write_text(body * 20)
    return folder


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(train_gpt, "SAMPLE_BYTES", 8)
    patch.setattr(train_gpt, "VALIDATION_WINDOWS", 32)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


def run(folder: Path, out: Path, *arguments: str) -> int:
    return train_gpt.main([*TINY, "--text", str(folder), "--out", str(out), *arguments])


def losses(out: Path, column: str = "te_fuser training loss") -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row[column]) for row in csv.DictReader(file) if row[column]]


def stop_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Send Ctrl-C while that step is under way."""
    take_step = trainer.Trainer._take_step

    def interrupted(self: trainer.Trainer) -> None:
        take_step(self)
        if self.step == step:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(trainer.Trainer, "_take_step", interrupted)


# -------------------------------------------------------------------------------------------------- training


def test_it_learns_and_leaves_its_results(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tmp_path / "run", "--steps", "60", "--prompt", "def ") == 0
    trained, validated = losses(tmp_path / "run"), losses(tmp_path / "run", "te_fuser validation loss")
    assert len(trained) == 60 and sum(trained[-5:]) < 0.6 * sum(trained[:5])
    assert validated[-1] < 0.8 * validated[0]
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["validation_loss"] == pytest.approx(validated[-1], abs=1e-5)
    shown = capsys.readouterr().out
    for words in ("forward", "backward", "rms_norm", "bigram model", "tokens/s", "validation loss"):
        assert words in shown


ALIKE: dict[str, tuple[list[str], float]] = {  # options, and by how much losses may differ
    "again": ([], 0.0),
    "reference kernels": (["--kernels", "reference"], 1e-4),
    "beside a twin": (["--compare"], 0.0),
    "bfloat16": (["--dtype", "bfloat16"], 0.05),
}


@pytest.fixture(scope="module")
def plain(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps."""
    out = tmp_path_factory.mktemp("runs") / "plain"
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        assert run(folder, out, "--steps", "4") == 0
    return out


@pytest.mark.parametrize("name", ALIKE)
def test_run_with_another_option_trains_alike(name: str, folder: Path, plain: Path, tmp_path: Path) -> None:
    options, most = ALIKE[name]
    assert run(folder, tmp_path / "other", "--steps", "4", *options) == 0
    assert losses(tmp_path / "other") == pytest.approx(losses(plain), rel=0, abs=most)
    samples = [(out / "sample.txt").read_bytes() for out in (plain, tmp_path / "other")]
    assert most or samples[0] == samples[1]


TWINS: dict[str, tuple[list[str], tuple[str, ...]]] = {  # options, and who trains alike
    "without dropout": (["--dropout", "0"], ("torch.nn", "te_fuser")),
    "nudged and compiled": (["--nudge", "--compile"], ("torch.nn", "torch.nn, nudged", "torch.compile")),  # same masks
}


@pytest.mark.parametrize("name", TWINS)
def test_twins_train_alike(
    name: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options, names = TWINS[name]
    compiled: list[torch.nn.Module] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    assert run(folder, tmp_path / "all", "--steps", "6", "--compare", *options) == 0
    first, *others = (losses(tmp_path / "all", f"{name} training loss") for name in names)
    assert first and all(other == pytest.approx(first, abs=1e-4) for other in others)
    assert all(name in capsys.readouterr().out for name in names[:1]) and len(compiled) == ("--compile" in options)


def test_a_nudged_twin_begins_beside_the_other_and_sees_the_same(folder: Path, tmp_path: Path) -> None:
    arguments = [*TINY, "--text", str(folder), "--compare", "--nudge", "--out", str(tmp_path)]
    trainers = train_gpt.Run.new(settings.parse(arguments)).trainers
    names = ("te_fuser", "torch.nn", "torch.nn, nudged")
    ours, theirs, moved = (dict(trainers[name].model.named_parameters()) for name in names)
    ups = []
    for name, weight in theirs.items():
        assert torch.equal(weight, ours[name])
        steps = moved[name].detach().view(torch.int32) - weight.detach().view(torch.int32)  # in the number's size
        assert bool((steps.abs() == 1).all()), name
        ups.append((moved[name] > weight).float().flatten())
    assert 0.45 < torch.cat(ups).mean() < 0.55
    random = [trainers[name].random_states() for name in names]  # of batches and of dropout
    assert all(torch.equal(states[key], random[0][key]) for states in random for key in random[0])


def test_a_nudge_knows_the_dtype() -> None:
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    before = model.weight.detach().clone()
    twin.nudge(model, torch.Generator().manual_seed(0))
    steps = model.weight.detach().view(torch.int16) - before.view(torch.int16)
    assert bool((steps.abs() == 1).all())


def test_products_in_8_bits_train_as_well(folder: Path, tmp_path: Path) -> None:
    """The mean of the last validation losses within 1% of that in bfloat16, on the same batches with the same masks."""
    ends = []
    for name in ("dtype", "fp8"):
        how = ("--dtype", "bfloat16", "--precision", name)
        assert run(folder, tmp_path / name, "--steps", "60", *how) == 0
        validated = losses(tmp_path / name, "te_fuser validation loss")
        ends.append(sum(validated[-10:]) / len(validated[-10:]))
    assert ends[0] != ends[1] and ends[1] == pytest.approx(ends[0], rel=0.01)


def test_a_size_sets_everything_and_what_is_given_wins(folder: Path) -> None:
    large = settings.parse(["--size", "large", "--steps", "7", "--text", str(folder)]).settings()
    assert (large.hidden, large.batch, large.steps) == (1024, 32, 7)
    with torch.device("meta"):
        models = [gpt.build_gpt(large.shape), twin.build_twin(large.shape)]
    assert [sum(p.numel() for p in m.parameters()) for m in models] == [pytest.approx(101e6, rel=0.01)] * 2
    assert settings.parse([]).settings() == settings.parse(["--size", "small"]).settings()


def test_a_run_that_diverges_says_so(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tmp_path / "run", "--steps", "20", "--lr", "1e38") == 1
    assert "start again with a lower --lr" in " ".join(capsys.readouterr().out.split())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_trains_on_a_gpu_and_goes_on_anywhere(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(folder, tmp_path / "cpu", "--steps", "9", "--dropout", "0") == 0
    assert run(folder, tmp_path / "gpu", "--steps", "9", "--dropout", "0", "--device", "cuda") == 0
    assert losses(tmp_path / "gpu") == pytest.approx(losses(tmp_path / "cpu"), abs=0.05)  # bfloat16
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        assert run(folder, tmp_path / "both", "--steps", "9", "--dropout", "0", "--device", "cuda") == 130
    assert train_gpt.main(["--resume", "--out", str(tmp_path / "both"), "--device", "cpu"]) == 0
    assert losses(tmp_path / "both") == pytest.approx(losses(tmp_path / "gpu"), abs=0.05)


def test_learning_rate_rises_then_falls() -> None:
    schedule = trainer.Schedule(1.0, 100)
    assert [schedule(step) for step in (0, 4, 5)] == pytest.approx([0.2, 1.0, 1.0])
    assert schedule(52) == pytest.approx((1 + trainer.LOWEST_RATE) / 2, abs=0.02)
    assert schedule(99) == pytest.approx(trainer.LOWEST_RATE, abs=0.01)


# ------------------------------------------------------------------------------------- stopping and going on


@pytest.mark.parametrize("precision", ["dtype", "fp8"])
def test_a_resumed_run_equals_one_without_a_stop(
    precision: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    how = ("--steps", "9", "--precision", precision)
    assert run(folder, tmp_path / "whole", *how) == 0
    with monkeypatch.context() as patched:
        stop_at(patched, 5)
        assert run(folder, tmp_path / "parts", *how) == 130
    assert f"--resume --out {tmp_path / 'parts'}" in capsys.readouterr().out.replace("\n", "")
    assert len(losses(tmp_path / "parts")) == 5
    assert train_gpt.main(["--resume", "--out", str(tmp_path / "parts")]) == 0

    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (load_file(tmp_path / name / "checkpoint.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, parts[name]), name


def test_a_finished_run_can_be_resumed_for_another_sample(plain: Path, tmp_path: Path) -> None:
    before = losses(shutil.copytree(plain, tmp_path / "run"))
    assert train_gpt.main(["--resume", "--out", str(tmp_path / "run"), "--prompt", "return "]) == 0
    assert losses(tmp_path / "run") == before
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("return ")


def test_ctrl_c_before_training(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt  # as the signal does, where it is not ignored, as by a shell's job in the background

    monkeypatch.setattr(train_gpt, "build_gpt", interrupted)
    assert run(folder, tmp_path / "run", "--steps", "2") == 130
    assert "stopped outside training: there was nothing to save" in capsys.readouterr().out


def test_a_file_is_no_folder_for_a_run(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert run(folder, tmp_path / "file") == 2
    assert "is no folder: name another" in capsys.readouterr().out.replace("\n", " ")


def test_ctrl_c_saves(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *TINY, "--steps", "1000000"]
    command += ["--text", str(folder), "--out", str(tmp_path / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if "to go" in line:  # the estimate, printed after some steps
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stdout.read()
            assert process.wait(timeout=30) == 130, rest
        finally:
            process.kill()
    assert "./dev train --resume --out" in rest
    saved = checkpoint.load(tmp_path / "run" / "checkpoint.safetensors")
    assert saved.step == len(saved.curve["training"]) > 0


# ------------------------------------------------------------------------------------------------ checkpoint


def test_the_checkpoint_is_safetensors_and_loads_into_the_twin(plain: Path) -> None:
    path = plain / "checkpoint.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])  # JSON, then numbers: no pickle
    data = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    assert 8 + length + max(stop for _, stop in data) == len(content)

    saved = checkpoint.load(path)
    assert {"blocks.0.attention.qkv.weight", "blocks.0.mlp.norm.weight", "head.weight"} <= saved.model.keys()
    for name in saved.model:
        assert {f"{name}.exp_avg", f"{name}.exp_avg_sq", f"{name}.step"} <= saved.optimizer.keys()
    shape = gpt.Shape(1, 32, 2, 16, 0.1)
    ours, theirs = gpt.build_gpt(shape), twin.build_twin(shape)
    ours.load_state_dict(saved.model)
    theirs.load_state_dict(saved.model)
    tokens = torch.randint(0, 256, (3, 16), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours.eval()(tokens), theirs.eval()(tokens), atol=1e-5, rtol=1e-4)


def test_nothing_in_the_example_pickles() -> None:
    for path in (ROOT / "examples").glob("*.py"):
        code = path.read_text()
        assert "torch.save" not in code and "torch.load" not in code and "import pickle" not in code, path.name


# --------------------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--heads", "5"], "heads must divide hidden: 32 features cannot be cut into 5 heads"),
     (["--heads", "32"], "must be even"), (["--layers", "0"], "layers must be 1 or more, got 0"),
     (["--dropout", "1"], "dropout must lie in [0, 1), got 1.0"),
     (["--steps", "0"], "--steps must be 1 or more, got 0"), (["--lr", "0"], "--lr must be positive, got 0.0"),
     (["--temperature", "0"], "--temperature must be positive, got 0.0"),
     (["--prompt", ""], "--prompt must not be empty"), (["--context", "100000"], "--context 100000 is too long"),
     (["--text", "nowhere"], "nowhere holds too few .py files"), (["--resume"], "to resume from"),
     (["--resume", "--compare"], "cannot be combined with --resume"), (["--nudge"], "add --compare"),
     (["--compile"], "--compile is about the twin that --compare trains: add --compare")],
)  # fmt: skip
def test_bad_arguments(
    arguments: list[str], words: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, tmp_path / "run", *arguments) == 2
    assert words in " ".join(capsys.readouterr().out.split())
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_gpu_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder, tmp_path / "run", "--device", "cuda") == 2
    assert "sees no CUDA device" in capsys.readouterr().out


def test_a_run_is_not_overwritten_nor_changed(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(folder, out, "--steps", "1", "--explain") == 0
    shown = capsys.readouterr().out
    assert "Forward" in shown and "Backward" in shown and "Kept for backward" in shown  # plans in full
    assert run(folder, out, "--steps", "1") == 2
    assert "holds a run already: add --resume" in " ".join(capsys.readouterr().out.split())
    assert run(folder, out, "--resume", "--hidden", "64") == 2
    assert "--hidden 64 differs from the run's 32" in " ".join(capsys.readouterr().out.split())
    (out / "checkpoint.safetensors").write_bytes(b"something else")
    assert run(folder, out, "--resume") == 2
    assert "cannot be read" in " ".join(capsys.readouterr().out.split())


def test_another_text_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for k in range(40):
        (folder / f"module_{k}.py").write_text(f"number = {k}\n" * 20)
    assert run(folder, tmp_path / "run", "--steps", "1") == 0
    (folder / "module_0.py").write_text("something = 'else'\n")
    assert train_gpt.main(["--resume", "--out", str(tmp_path / "run")]) == 2
    assert "are not those that the run" in " ".join(capsys.readouterr().out.split())


def test_runs_get_folders_of_their_own(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert train_gpt.main([*TINY, "--text", str(folder), "--steps", "1"]) == 0
    assert sorted(path.parent.name for path in Path("runs").glob("*/checkpoint.safetensors")) == ["gpt", "gpt-2"]
    assert train_gpt.main(["--resume"]) == 0


# ---------------------------------------------------------------------------------------- text and its baseline


def test_bigram_loss_by_hand() -> None:
    counted = torch.tensor(list(b"abab"), dtype=torch.uint8)  # ab twice, ba once
    bigram = text.Bigram(counted, smoothing=1.0)
    windows = text.Windows(torch.tensor([list(b"ab")]), torch.tensor([list(b"bz")]))  # ab, bz
    by_hand = -(math.log((2 + 1) / (2 + 256)) + math.log((0 + 1) / (1 + 256))) / 2
    assert bigram.loss(windows) == pytest.approx(by_hand)


def test_text_is_split_by_file_and_leaves_tests_out(folder: Path) -> None:
    found = text.read_text(folder)
    assert found.training_files + found.validation_files == 40
    assert found.training.numel() + found.validation.numel() == sum(p.stat().st_size for p in folder.iterdir())
    inner = folder / "test"
    inner.mkdir()
    (inner / "more.py").write_text("assert True\n")
    assert text.read_text(folder).fingerprint == found.fingerprint
    assert text.read_text(folder, most_bytes=20_000).training_files < found.training_files
    inner.joinpath("more.py").unlink()
    inner.rmdir()


def test_every_machine_has_text() -> None:
    found = text.read_text(text.standard_library())
    assert found.training.numel() > 4_000_000 and found.validation.numel() > 200_000
    assert found.training_files > 5 * found.validation_files > 50


def test_windows_and_their_next_bytes() -> None:
    data = torch.arange(100, dtype=torch.uint8)
    spread = text.spread_windows(data, 1000, 9)
    assert spread.inputs.shape == (11, 9)
    assert torch.equal(spread.targets, spread.inputs + 1)
    drawn = text.random_windows(data, 5, 9, torch.Generator().manual_seed(0))
    assert drawn.inputs.shape == (5, 9) and torch.equal(drawn.targets, drawn.inputs + 1)

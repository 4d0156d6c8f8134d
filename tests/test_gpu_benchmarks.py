"""The commands for GPU benchmarks and GPU tests, without a GPU: toy sizes, records, tables, documents."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional

import te_fuser
from tests import fake_cuda
from tests.needs import needs_compiler

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu  # noqa: E402
import gpu_cases  # noqa: E402
import gpu_child  # noqa: E402
import gpu_entries  # noqa: E402
import gpu_floor  # noqa: E402
import gpu_goals  # noqa: E402
import gpu_measure  # noqa: E402
import gpu_part_first_call  # noqa: E402
import gpu_part_glue  # noqa: E402
import gpu_part_host  # noqa: E402
import gpu_part_train  # noqa: E402
import gpu_parts  # noqa: E402
import gpu_report  # noqa: E402
import gpu_rivals  # noqa: E402
import gpu_tests  # noqa: E402
import models  # noqa: E402
from gpu_bench import TOY as TOY_SCALE  # noqa: E402
from gpu_bench import Bench  # noqa: E402
from gpu_goals import Goal  # noqa: E402
from models import rivals  # noqa: E402

CPU = gpu_measure.Card(torch.device("cpu"))
TOY = Bench(CPU, TOY_SCALE, gpu_measure.TRIAL, with_compile=False)


# ---------------------------------------------------------------------------------------------------- parts


SLOW = ("first-call", "train", "train-exact")  # they start processes
PARTS = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in gpu_parts.PARTS]


@pytest.mark.parametrize("name", PARTS)
def test_every_part_runs(name: str) -> None:
    entries = list(gpu_parts.PARTS[name].run(TOY))
    assert entries
    for entry in entries:
        assert len(entry["contenders"]) >= 2 and any(n.startswith("te_fuser") for n in entry["contenders"])
    header, rows = gpu_report.table_of(entries)
    assert all(len(row) == len(header) for row in rows) and rows[0][0] == entries[0]["case"]


class PretendedGpu(gpu_measure.Card):
    """The CPU, asked as a GPU is."""

    is_gpu, name = True, "Pretended"  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def joules(self) -> float:
        return 1.0

    def clock_mhz(self) -> int:
        return 1980


class PretendedEvent:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.recorded = True

    def elapsed_time(self, other: PretendedEvent) -> float:
        assert self.recorded and other.recorded
        return 1.0


class PretendedStream:
    def wait_stream(self, other: PretendedStream) -> None:
        assert isinstance(other, PretendedStream)


class PretendedGraph:
    def replay(self) -> None:
        pass


class PretendedProfile:
    """What the profiler writes: two kernels for each call."""

    def __init__(self, activities: object, acc_events: bool) -> None:
        pass

    def __enter__(self) -> PretendedProfile:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def export_chrome_trace(self, path: str) -> None:
        names = ("nvjet_hsh_128x256", "layer_norm_fwd") * gpu_measure._TRACED
        events = [event(name, 10.0 * k, 8.0) for k, name in enumerate(names)]
        Path(path).write_text(json.dumps({"traceEvents": events}))


@pytest.fixture
def gpu_bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A bench on the CPU that takes every path of a GPU's."""
    matmul, stream = gpu_floor.matmul, PretendedStream()
    for owner, name, value in (
        (torch.cuda, "synchronize", lambda device=None: None),
        (torch.cuda, "_sleep", lambda cycles: None),
        (torch.cuda, "Event", PretendedEvent),
        (torch.cuda, "Stream", PretendedStream),
        (torch.cuda, "current_stream", lambda: stream),
        (torch.cuda, "stream", lambda stream: contextlib.nullcontext()),
        (torch.cuda, "CUDAGraph", PretendedGraph),
        (torch.cuda, "graph", lambda graph: contextlib.nullcontext()),
        (torch.cuda, "memory_allocated", lambda device: 5 << 20),
        (torch.cuda, "reset_peak_memory_stats", lambda device: None),
        (torch.cuda, "max_memory_allocated", lambda device: 7 << 20),
        (torch.profiler, "profile", PretendedProfile),
        (torch, "compile", lambda model: model),
        (te_fuser, "cuda_graph", lambda model, x: model),
        (matmul, "problem", lambda: None),
        *((matmul, kind, gpu_floor._TORCH[kind]) for kind in gpu_floor._TORCH),
    ):
        monkeypatch.setattr(owner, name, value)
    return Bench(PretendedGpu(), TOY_SCALE, gpu_measure.TRIAL)


@pytest.mark.parametrize("name", [name for name in gpu_parts.PARTS if name not in SLOW])
def test_every_part_takes_the_paths_of_a_gpu(name: str, gpu_bench: Bench, tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    writer = gpu.Writer(path, name, ABOUT, gpu.parse(["--toy"]), gpu_bench)
    assert gpu.run_part(writer, Console(quiet=True))
    part = json.loads(path.read_text())["parts"][name]
    assert "problem" not in part and part["options"]["compile"]
    for entry in part["cases"]:
        ours = entry["contenders"]["te_fuser"]
        assert "left_out" not in entry and ours["joules"] == 0.0 and ours["mhz"] == 1980
    entries = part["cases"]
    assert any("torch.compile" in e["contenders"] for e in entries) == (name not in ("stack", "growth"))
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
    if name == "growth":
        assert {e["grows"] for e in entries} == {"tokens", "hidden"} and "floor" in entries[0]["contenders"]


def test_the_floor_of_a_call_makes_new_gradients_for_all_that_has_one(gpu_bench: Bench) -> None:
    torch.manual_seed(0)
    eager = rivals(gpu_bench.build(models.four_ops, 4, 8), torch.float32)["eager"]
    floor = gpu_part_host.idle(eager)
    y, made = floor.forward_and_backward(), [t.grad for t in (eager.x, *eager.model.parameters())]
    assert y.shape == eager.forward().shape and len(made) == 7
    assert [g.shape for g in made] == [t.shape for t in (eager.x, *eager.model.parameters())]


@needs_compiler
@pytest.mark.parametrize("name", ["layer", "mlp", "llama", "glue", "host"])
def test_parts_run_cuda_kernels(name: str, gpu_bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their emulation on the CPU; where nothing is drawn, the part itself compares results with eager's."""
    emulation = fake_cuda.Emulation(tmp_path)
    with fake_cuda.in_place(fake_cuda.compile_driver(tmp_path)) as driver, emulation.in_plans():
        assert all("left_out" not in entry for entry in gpu_parts.PARTS[name].run(gpu_bench))
        assert driver.launches > 50


def test_what_a_plan_has_competes_with_the_plan_without_it(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(name in te_fuser.fusions.names() for name in gpu_cases.OPTIONAL)
    monkeypatch.setattr(gpu_cases, "OPTIONAL", ("matmul_bias",))
    entry = next(gpu_parts.PARTS["layer"].run(gpu_bench))
    ours = [name for name in entry["contenders"] if name.startswith("te_fuser")]
    assert ours == ["te_fuser", "te_fuser fast", "te_fuser lean", gpu_cases.WITHOUT]
    model, x = te_fuser.Sequential(te_fuser.ops.Linear(8, 8)), torch.randn(4, 8)
    planned: list[list[str]] = []
    monkeypatch.setattr(model, "forward", lambda x: planned.append([s.name for s in model.plan(x).forward]))
    model(x)
    gpu_cases._Without(model)(x)
    assert ["matmul_bias" in names for names in planned] == [True, False]


def test_a_rival_that_fails_is_left_out(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(model: torch.nn.Module) -> torch.nn.Module:
        raise RuntimeError("no\n compiler")

    monkeypatch.setattr(torch, "compile", fails)
    for name in ("llama", "glue", "host"):
        entry = next(gpu_parts.PARTS[name].run(gpu_bench))
        assert entry["left_out"] == {"torch.compile": "RuntimeError: no compiler"}
        assert "torch.compile" not in entry["contenders"] and "te_fuser" in entry["contenders"]


def test_times_stay_where_the_profiler_fails(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise RuntimeError("the profiler saw no kernel")

    for module in (gpu_entries, gpu_part_glue):
        monkeypatch.setattr(module, "traced", fails)
    for name in ("llama", "glue", "stack"):
        entry = next(gpu_parts.PARTS[name].run(gpu_bench))
        assert entry["left_out"] == {"kernels": "RuntimeError: the profiler saw no kernel"}
        assert entry["contenders"]["te_fuser"]["ms"] > 0 and "kernels" not in entry["contenders"]["te_fuser"]


def test_what_cannot_be_recorded_as_a_graph_is_left_out(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.requires_grad and not torch.is_grad_enabled():
                raise RuntimeError("operation not permitted when stream is capturing")
            return x * 1.0

    monkeypatch.setattr(torch, "compile", lambda model: Refusing())
    forward, both = itertools.islice(gpu_parts.PARTS["glue"].run(gpu_bench), 2)
    assert "not permitted" in forward["left_out"]["torch.compile"] and "left_out" not in both


def test_a_tuned_model_takes_part(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def tune(model: te_fuser.Sequential, x: torch.Tensor, **options: Any) -> str:
        calls.append(options)
        return "what was tried"

    monkeypatch.setattr(te_fuser.Sequential, "tune", tune)
    (entry,) = gpu_parts.PARTS["llama"].run(dataclasses.replace(gpu_bench, tune=True))
    assert entry["tuning"] == "what was tried" and calls == [{"rounds": 3, "seconds": 0.1}]
    assert "over_best_rival" in entry["contenders"]["te_fuser tuned"]
    assert "what was tried" in gpu_report.remarks([entry])


def entries_then(outcome: Exception | None, count: int = 2) -> gpu_parts.Part:
    def run(bench: Bench) -> Iterator[gpu_entries.Entry]:
        for k in range(count):
            yield gpu_entries.compared(f"case {k}", {"eager": result(1.0), "te_fuser": result(0.5)})
        if outcome is not None:
            raise outcome

    return gpu_parts.Part("pretended", run, 1)


def test_a_part_that_fails_keeps_its_cases_and_the_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setitem(gpu.PARTS, "stack", entries_then(RuntimeError("an illegal memory access")))
    monkeypatch.setitem(gpu.PARTS, "glue", entries_then(RuntimeError("at once"), 0))
    monkeypatch.setitem(gpu.PARTS, "host", entries_then(None))
    assert gpu.main(["--toy", "--part", "stack", "glue", "host", "--record", str(path), "--commit", "abc"]) == 1
    parts = json.loads(path.read_text())["parts"]
    assert set(parts) == {"stack", "host"} and "problem" not in parts["host"]
    assert len(parts["stack"]["cases"]) == 2 and "an illegal memory access" in parts["stack"]["problem"]
    assert "at once" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["record.json"]


def test_what_ends_the_process_leaves_the_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setitem(gpu.PARTS, "stack", entries_then(KeyboardInterrupt()))  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        gpu.main(["--toy", "--part", "stack", "--record", str(path)])
    part = json.loads(path.read_text())["parts"]["stack"]
    assert len(part["cases"]) == 2 and part["problem"] == "not finished"


def test_a_part_stops_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.json"
    monkeypatch.setattr(gpu, "LIMIT", 0)
    monkeypatch.setitem(gpu.PARTS, "stack", entries_then(None))
    assert gpu.main(["--toy", "--part", "stack", "--record", str(path)]) == 1
    part = json.loads(path.read_text())["parts"]["stack"]
    assert len(part["cases"]) == 1 and "should end within" in part["problem"]


def test_parts_on_a_gpu_begin_with_empty_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
    folders = []
    for name in gpu.in_turn(("a", "b"), Bench(PretendedGpu(), TOY_SCALE, gpu_measure.TRIAL)):
        folders.append(te_fuser.config.cache_dir)
        assert name in "ab" and not list(te_fuser.config.cache_dir.iterdir())
        assert os.environ["XDG_CACHE_HOME"] == str(te_fuser.config.cache_dir)
    assert len(set(folders)) == 2


def test_a_child_that_fails_or_hangs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="failed:\nbefore"):
        gpu_child.output_of(["-c", "print('before'); raise SystemExit(3)"])
    monkeypatch.setattr(gpu_child, "CHILD_LIMIT", 0.5)
    with pytest.raises(RuntimeError, match="did not end within"):
        gpu_child.output_of(["-c", "import time; time.sleep(30)"])


def pretended_training(offsets: Mapping[str, float], steps: int, *, validated: int) -> Callable[[list[str]], str]:
    """What stands for the example: losses that lie so far from 2, and validation losses every so many steps."""

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
    monkeypatch.setattr(gpu_part_train, "output_of", pretended_training(offsets, 119, validated=30))
    (entry,) = gpu_part_train.train_exact(TOY)
    assert entry["case"].endswith("--dropout 0 --steps 3 --nudge")
    assert entry["noise"] == pytest.approx(0.02) and entry["largest_difference"] == pytest.approx(0.05)
    ours = entry["contenders"]["te_fuser"]
    assert ours["difference_over_noise"] == pytest.approx(2.5) and ours["speed_up"] == 1.5
    assert [(goal["most"], goal["met"]) for goal in entry["goals"]] == [(2, False)]
    assert entry["validation_steps"] == [30, 60, 90] and ours["validation_losses"] == [1.05] * 3
    assert ours["training_losses"] == [[step, 2.05] for step in range(1, 120, 3)]  # 50 points at most


def test_a_nudge_that_loses_its_way_in_the_digits_is_one_digit(monkeypatch: pytest.MonkeyPatch) -> None:
    offsets = {"te_fuser": 0.0001, "torch.nn": 0.0, "torch.nn, nudged": 0.0}
    monkeypatch.setattr(gpu_part_train, "output_of", pretended_training(offsets, 5, validated=5))
    (entry,) = gpu_part_train.train_exact(TOY)
    assert entry["noise"] == 0 and entry["contenders"]["te_fuser"]["difference_over_noise"] == pytest.approx(10)


def test_losses_are_compared_beside_noise() -> None:
    names = ("te_fuser", "torch.nn", "torch.nn, nudged")
    rows = [{f"{n} training loss": str(2.0 + d) for n, d in zip(names, (0.01, 0.0, 0.1), strict=True)}] * 30
    assert gpu_part_train._largest_difference(rows, "te_fuser") == pytest.approx(0.01)
    assert gpu_part_train._largest_difference(rows, "torch.nn, nudged") == pytest.approx(0.1)
    rows[5] = {**rows[5], "te_fuser training loss": "3.0"}
    assert gpu_part_train._largest_difference(rows, "te_fuser") == pytest.approx((19 * 0.01 + 1.0) / 20)
    assert gpu_part_train._largest_difference(rows, "te_fuser", smoothed=1) == pytest.approx(1.0)


def test_the_note_on_training_says_how_far_the_losses_lie_apart() -> None:
    entry = {
        "contenders": {"te_fuser": {"speed_up": 1.9}, "torch.nn": {}, "torch.nn, nudged": {}},
        "largest_difference": 0.01, "late_difference": 0.005,
        "early_difference": 0.0001, "noise": 0.2, "bigram_loss": 2.4,
    }  # fmt: skip
    note = gpu_report._note(entry)
    assert "differ by 0.0100 nats at most (0.005 in the second half), each of the first ten by 0.0001" in note
    assert "those of `torch.nn, nudged` differ from `torch.nn`'s by 0.2000" in note


@pytest.mark.slow
def test_the_command_writes_a_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    for part in ("mlp", "host"):
        command = ["benchmarks/gpu.py", "--toy", "--part", part, "--record", str(path), "--commit", "abc"]
        done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "te_fuser" in done.stdout
    record = json.loads(path.read_text())
    assert set(record["parts"]) == {"host", "mlp"} and record["commit"] == "abc" and record["gpu"] == "CPU"
    assert "--part host" in record["command"] and "--part mlp" in record["parts"]["mlp"]["command"]
    numbers = record["parts"]["mlp"]["cases"][0]["contenders"]["te_fuser"]
    assert {"ms", "over_floor", "over_eager", "over_best_rival", "kept_mib"} <= set(numbers)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--part", "speed"], "there is no part speed"),
        (["--quick", "--write-docs"], "whole run"),
        (["--rounds", "0"], "1 or more"),
    ],
)
def test_wrong_arguments(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_both_commands_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="PyTorch sees none here; --toy"):
        gpu.main(["--part", "layer"])
    assert gpu_tests.main(["--part", "elsewhere"]) == 2
    assert "need a CUDA device" in capsys.readouterr().out


# ------------------------------------------------------------------------------------------------- measuring


def test_contenders_take_turns_and_change_who_begins() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    results = gpu_measure.contest(steps, gpu_measure.TRIAL, CPU)
    assert calls[-6:] == ["a", "b", "c", "b", "c", "a"]
    assert all(len(r.blocks) == gpu_measure.TRIAL.rounds for r in results.values())


def result(*seconds: float) -> gpu_measure.Result:
    return gpu_measure.Result(tuple(gpu_measure.Block(s, None, None) for s in seconds))


def test_an_effort_in_shorter_blocks_is_as_long() -> None:
    assert gpu_measure.SHORT.in_shorter_blocks(5) == gpu_measure.Effort(25, gpu_measure.SHORT.block / 5, 0.5)


@pytest.mark.parametrize("optional", [True, False])
def test_first_calls_with_and_without_optional_packages(monkeypatch: pytest.MonkeyPatch, optional: bool) -> None:
    asked: list[tuple[list[str], dict[str, str]]] = []

    def child(command: list[str], **environment: str) -> str:
        asked.append((command, environment))
        return "a library's own words\n" + json.dumps({"times": {"seconds": 2.0}, "optional": optional})

    monkeypatch.setattr(gpu_part_first_call, "output_of", child)
    (entry,) = gpu_part_first_call.first_call(TOY)
    plans = ["te_fuser", gpu_cases.WITHOUT] if optional else ["te_fuser"]
    assert list(entry["contenders"]) == ["eager", *(f"{p}, {c} cache" for p in plans for c in ("empty", "warm"))]
    assert [g["met"] for g in entry["goals"]] == [True, False] * len(plans)
    # Each plan begins with folders of its own, where its second process finds what the first one compiled.
    folders = [command[command.index("--cache") + 1] for command, _ in asked[1:]]
    assert folders[::2] == folders[1::2] and len(set(folders)) == len(plans)
    assert [environment for _, environment in asked[1:]] == [{"QUACK_CACHE_DIR": f} for f in folders]
    assert ["--without" in command for command, _ in asked] == [False] * 3 + [True, True] * (len(plans) - 1)


def test_ratios_are_of_rounds() -> None:
    # The clock halves in the last two rounds: the ratio of the medians would be 1.6 / 2.
    assert result(0.8, 1.6, 1.6).over(result(1.0, 2.0, 2.0)) == pytest.approx(0.8)
    assert result(1.0, 3.0, 2.0).as_data()["range_ms"] == [1000.0, 3000.0]


def test_entries_know_the_best_rival_measured_or_earlier() -> None:
    case = "seed layer bf16 dropout 0.1"
    results = {"floor": result(1.0), "eager": result(1.3), "torch.compile": result(1.2), "te_fuser": result(1.1)}
    entry = gpu_entries.compared(case, results)
    earlier = 17.90 / 15.95
    assert entry["best_rival"] == gpu_rivals.TE and entry["earlier"]["over_floor"][gpu_rivals.TE] == earlier
    assert entry["contenders"]["te_fuser"]["over_best_rival"] == pytest.approx(1.1 / earlier)
    results[gpu_rivals.TE] = result(1.25)  # it is here: what it reached earlier does not count
    entry = gpu_entries.compared(case, results)
    assert entry["best_rival"] == "torch.compile" and "earlier" not in entry
    assert "over_best_rival" not in entry["contenders"]["eager"]


def test_earlier_runs_without_a_floor_go_by_eager() -> None:
    found = gpu_rivals.earlier_over_floor("LayerNorm-GELU MLP bf16", eager_over_floor=1.2)
    assert found[gpu_rivals.TE] == pytest.approx(10.01 / 10.26 * 1.2)
    assert gpu_rivals.earlier_over_floor("SwiGLU", 2.0)[gpu_rivals.LIGER] == pytest.approx(4247 / 4216)
    assert gpu_rivals.earlier_over_floor("something new", 1.0) == {}


def test_what_is_installed_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"transformer_engine.pytorch": types.SimpleNamespace(LayerNorm=torch.nn.LayerNorm)})
    found = gpu_rivals.installed("LayerNorm", 8, 0.0)
    assert list(found) == [gpu_rivals.TE] and found[gpu_rivals.TE]().normalized_shape == (8,)  # type: ignore[comparison-overlap]
    assert gpu_rivals.installed("Llama layer", 8, 0.0) == {}


def have(monkeypatch: pytest.MonkeyPatch, libraries: Mapping[str, object]) -> None:
    """Of the libraries' modules these are installed, and no others."""
    there = {name.partition(".")[0] for name in libraries}
    monkeypatch.setattr(gpu_rivals, "_is_there", lambda package: package.partition(".")[0] in there)
    for name, module in libraries.items():
        monkeypatch.setitem(sys.modules, name, module)


class PretendedQuackMLP(torch.nn.Sequential):
    def __init__(self, hidden: int, inner: int, activation: str, tuned: bool) -> None:
        up, down = torch.nn.Linear(hidden, 2 * inner, bias=False), torch.nn.Linear(inner, hidden, bias=False)
        super().__init__(up, models._EagerSwiGLU(), down)
        assert activation == "swiglu"
        self.tuned = tuned


def quack_mlp(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, activation: str, **rest: Any) -> torch.Tensor:
    assert activation == "gelu_tanh_approx" and isinstance(rest["tuned"], bool)
    y = functional.gelu(functional.linear(x, up, rest["bias1"]), approximate="tanh")
    return functional.linear(y, down, rest["bias2"])


LIBRARIES = {
    "quack.mlp": types.SimpleNamespace(mlp_func=quack_mlp, MLP=PretendedQuackMLP),
    "quack.rmsnorm": types.SimpleNamespace(QuackRMSNorm=torch.nn.RMSNorm),
    "liger_kernel.transformers": types.SimpleNamespace(
        LigerLayerNorm=torch.nn.LayerNorm, LigerRMSNorm=torch.nn.RMSNorm
    ),
    "liger_kernel.ops.swiglu": types.SimpleNamespace(
        LigerSiLUMulFunction=types.SimpleNamespace(apply=lambda gate, linear: functional.silu(gate) * linear)
    ),
}


@pytest.mark.parametrize(
    ("case", "builder"), [("LayerNorm-GELU MLP", models.mlp), ("RMSNorm-SwiGLU MLP", models.gated_mlp)]
)
def test_libraries_do_the_same_work_as_eager(
    case: str, builder: models.Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(monkeypatch, LIBRARIES)
    torch.manual_seed(0)
    eager = rivals(builder(4, 16), torch.float64)["eager"]
    eager.forward_and_backward()
    expected = [leaf.grad for leaf in eager.leaves]
    found = gpu_rivals.installed(case, 16, 0.0, tuned=True)
    assert list(found) == [gpu_rivals.LIGER, gpu_rivals.QUACK, gpu_rivals.QUACK_TUNED]
    for make in found.values():
        model = make().double()
        models.copy_parameters(eager.model, model)
        rival = eager.like(model)
        torch.testing.assert_close(rival.forward_and_backward(), eager.forward())
        torch.testing.assert_close([leaf.grad for leaf in rival.leaves], expected)


def test_quack_takes_part_and_tuned_only_on_demand(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {name: module for name, module in LIBRARIES.items() if name.startswith("quack")})
    monkeypatch.setattr(te_fuser.Sequential, "tune", lambda model, x, **options: "what was tried")
    for tune, names in ((False, [gpu_rivals.QUACK]), (True, [gpu_rivals.QUACK, gpu_rivals.QUACK_TUNED])):
        entries = list(itertools.islice(gpu_parts.PARTS["mlp"].run(dataclasses.replace(gpu_bench, tune=tune)), 2))
        assert all([n for n in entry["contenders"] if n.startswith("quack")] == names for entry in entries)
        assert not any("left_out" in entry for entry in entries)


@pytest.fixture
def transformer_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package that stands for it, to be written."""
    names = ("transformer_engine", "transformer_engine.pytorch")
    package = tmp_path / names[0]
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    for name in names:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield package / "pytorch.py"
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise RuntimeError('no CUDA 12\\n here')", "RuntimeError: no CUDA 12 here"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("def LayerNorm(hidden): raise ValueError(f'not for {hidden}')", "ValueError: not for 64"),
    ],
    ids=["import", "its own package", "maker"],
)
def test_a_library_that_fails_when_it_is_imported_or_made_is_left_out(
    text: str, reason: str, gpu_bench: Bench, transformer_engine: Path
) -> None:
    transformer_engine.write_text(text)
    entry = next(gpu_parts.PARTS["glue"].run(gpu_bench))
    assert entry["left_out"][gpu_rivals.TE] == reason and "te_fuser" in entry["contenders"]


def event(name: str, ts: float, dur: float, cat: str = "kernel") -> Mapping[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat}


def test_a_trace_counts_kernels_and_finds_products() -> None:
    events = [
        event("at::cuda::spin_kernel(long)", -900.0, 890.0),  # what the calls queue up behind
        event("nvjet_tst_128x256", 0.0, 50.0),
        event("layer_norm_fwd", 50.0, 10.0),
        event("Memset (Device)", 60.0, 1.0, "gpu_memset"),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 61.0, 29.0),
        event("aten::mm", 0.0, 100.0, "cpu_op"),
    ]
    trace = gpu_measure.summarized(events, repeats=2)
    assert (trace.kernels, trace.memsets) == (1.5, 0.5) and trace.span == pytest.approx(45e-6)
    assert [trace.products, trace.attention, trace.rest] == pytest.approx([25e-6, 14.5e-6, 5.5e-6])
    assert trace.names["layer_norm_fwd"] == pytest.approx((0.5, 5e-6))
    assert trace.as_data()["over_own_products"] == pytest.approx(45 / 39.5)
    with pytest.raises(RuntimeError, match="no kernel"):
        gpu_measure.summarized(events[-1:], 1)


def test_kernels_of_cutes_compiler_are_known_by_what_follows_its_name() -> None:
    kinds = {
        "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_linear_act_epi": "products",
        "kernel_cutlass_kernel_quackrmsnormRMSNormBackward_object_at": "rest",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>": "products",
    }
    assert {name: gpu_measure._kind(name) for name in kinds} == kinds


def test_kernels_that_begin_early_do_not_count_twice() -> None:
    events = [
        event("nvjet", 0.0, 50.0), event("layer_norm_fwd", 40.0, 20.0), event("nvjet", 70.0, 10.0),
        event("layer_norm_fwd", 75.0, 10.0),
    ]  # fmt: skip
    trace = gpu_measure.summarized(events, repeats=2)
    assert [trace.products, trace.rest, trace.span] == pytest.approx([30e-6, 7.5e-6, 42.5e-6])
    assert trace.as_data()["idle_ms"] == pytest.approx(5e-3)  # of both calls, from 60 to 70
    assert trace.order == ("nvjet", "layer_norm_fwd")
    assert gpu_measure.summarized(events[:3], repeats=3).order == ()
    assert gpu_report.kernels_in_order(trace.as_data()) == "nvjet 30 us | layer_norm_fwd 15 us"
    assert gpu_report.kernels_in_order({"by_name": [{"kernel": "a", "count": 2.0, "ms": 0.01}]}) == "2 x a 5 us"
    assert gpu_report.kernels_in_order({}) == ""


def test_goals_are_judged_where_their_numbers_are() -> None:
    goals = (Goal("ms", 2.0), Goal("gbps", 3800.0, at_least=True), Goal("peak_mib", 1.0))
    found = gpu_goals.judged(goals, {"contenders": {"te_fuser": {"ms": 1.5, "gbps": 3700.0}}})
    assert [(v["what"], v["met"]) for v in found] == [("ms", True), ("gbps", False)]
    assert gpu_goals.sentence(found[1]) == "te_fuser gbps 3700 >= 3800 (missed)"


def test_kept_bytes_are_those_that_autograd_saves() -> None:
    x, weight = torch.randn(10, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)  # saves x and the weight
        return (y.exp() * y.view(30).view(10, 3)).sin()  # saves exp's result, y and a view of it, the product

    assert gpu_measure.kept_bytes(forward, [weight]) == 4 * (40 + 3 * 30)


# ---------------------------------------------------------------------------------------------------- floor


def test_the_floor_has_a_layers_products() -> None:
    attention = models.Attention(128, 16)
    work = gpu_floor.layer_work(attention, gpu_floor.gated_work)(32, 64)
    build = models.llama(attention)(32, 64)
    weights = [p.shape for p in build.eager.parameters() if p.dim() == 2]
    assert [(p.outputs, p.inputs) for p in work.products] == [tuple(s) for s in weights]
    floor = gpu_floor.make_floor(work.times(2), torch.float32, CPU)
    assert floor.taken == {"torch.mm": 2 * 3 * 4}


def test_products_have_the_shapes_of_a_linear_layer() -> None:
    y, dx, dw = (m() for m in gpu_floor.multiplications(gpu_floor.Product(5, 3, 7), torch.float32, CPU.device))
    assert (y.shape, dx.shape, dw.shape) == ((5, 7), (5, 3), (7, 3))


# ------------------------------------------------------------------------------------- records and documents

ABOUT = {
    "written": "2026-01-02T03:04:05+00:00", "gpu": "NVIDIA Test 1", "commit": "abc", "versions": {"torch": "2"},
    "command": "python benchmarks/gpu.py", "card": {"driver": "1"},
}  # fmt: skip


def layer_record() -> dict[str, Any]:
    results = {"floor": result(1.0), "eager": result(1.3), "te_fuser": result(1.1)}
    entry = gpu_entries.compared("seed layer bf16 dropout 0.1", results)
    spent = {"products_ms": 8.0, "attention_ms": 1.0, "rest_ms": 0.5, "idle_ms": 0.25}
    entry["contenders"]["te_fuser"] |= spent
    row = {"direction": "forward", "step": "mat_mul", "ops": "MatMul", "moved_mib": 1.0, "predicted_ms": 1.0}
    entry["plan"] = [{**row, "measured_ms": 2.0, "limit": "products", "share": 0.5}]
    entry["goals"] = gpu_goals.judged((gpu_goals.over_floor(1.05),), entry)
    return gpu_report.part_record(ABOUT, gpu_measure.FULL, {"quick": False}, 12.34, [entry])


def test_records_merge_by_part(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "gpu.json"
    gpu_report.merge(path, "mlp", {**layer_record(), "commit": "old"})
    gpu_report.merge(path, "layer", layer_record())
    gpu_report.merge(path, "mlp", {**layer_record(), "commit": "new", "seconds": 1.23456789})
    record = json.loads(path.read_text())
    assert list(record["parts"]) == ["layer", "mlp"] and record["commit"] == "new"
    assert '"rounds_ms": [1000.0],' in path.read_text()
    assert record["parts"]["layer"]["commit"] == "abc" and record["parts"]["mlp"]["seconds"] == 1.23457


def test_a_document_says_how_many_rounds_there_were_whatever_was_asked_for() -> None:
    part = layer_record()
    assert part["options"]["rounds"] == 5
    assert " 1 round of blocks of 2 s or less;" in gpu_report._section(part)
    part["cases"][0]["contenders"]["eager"]["rounds_ms"] *= 3
    part["options"]["quick"] = True
    assert " 1 to 3 rounds of blocks of 2 s or less (take it as a hint);" in gpu_report._section(part)
    for data in part["cases"][0]["contenders"].values():
        del data["rounds_ms"]
    assert "rounds" not in gpu_report._section(part)


def test_records_from_elsewhere_are_taken_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_report, "RESULTS", tmp_path / "results")
    gpu_report.merge(gpu_report.record_path("NVIDIA Test 1"), "layer", layer_record())
    files = [tmp_path / "bench.json", tmp_path / "tests.json"]
    unfinished = {**layer_record(), "commit": "def", "problem": "not finished"}
    gpu_report.merge(files[0], "layer", unfinished)
    gpu_report.merge(files[0], "stack", unfinished)
    elsewhere = "python benchmarks/gpu.py --part mlp --record /some/where/bench.json"
    gpu_report.merge(files[0], "mlp", {**layer_record(), "commit": "def", "command": elsewhere})
    gpu_report.merge(files[1], "capture", {**ABOUT, "passed": 3, "seconds": 12.0})
    assert gpu.main(["--take-in", *map(str, files)]) == 0
    parts = json.loads((tmp_path / "results/gpu-nvidia-test-1.json").read_text())["parts"]
    assert {name: part["commit"] for name, part in parts.items()} == {"layer": "abc", "mlp": "def", "stack": "def"}
    assert parts["mlp"]["command"] == "python benchmarks/gpu.py --part mlp --record bench.json"
    tests = json.loads((tmp_path / "results/gpu-tests-nvidia-test-1.json").read_text())
    assert tests["parts"]["capture"]["passed"] == 3
    assert "gpu-tests-nvidia-test-1.json" in capsys.readouterr().out
    usual = {**dict.fromkeys(gpu_tests.parts(), gpu_tests.USUAL), **gpu_tests.ABOUT}
    assert gpu_tests.estimates() == {**usual, "capture": 12.0}


def test_a_record_has_the_name_of_its_gpu() -> None:
    assert gpu_report.record_path("NVIDIA H200").name == "gpu-nvidia-h200.json"
    assert gpu_report.record_path("NVIDIA H200", "gpu-tests").name == "gpu-tests-nvidia-h200.json"


def test_documents_take_tables_and_plans(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("".join(f"<!-- begin gpu {n} -->\n<!-- end gpu {n} -->\n" for n in ("layer", "plan", "time")))
    gpu_report.write_docs([{**ABOUT, "parts": {"layer": {**layer_record(), "problem": "a\nstopped"}}}], page)
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
    monkeypatch.setattr(gpu_report, "RESULTS", tmp_path)
    gpu_report.merge(tmp_path / "gpu-test-1.json", "layer", layer_record())
    gpu_report.merge(tmp_path / "gpu-tests-test-1.json", "capture", {**ABOUT, "passed": 3, "seconds": 12.0})
    (tmp_path / "gpu-kernels-test-1.json").write_text('{"kernels": []}')
    (record,) = gpu_report.records()
    assert list(record["parts"]) == ["layer"]


def test_a_slow_copy_is_named() -> None:
    cases = [{"case": c, "contenders": {"copy": {"gbps": speed}}} for c, speed in (("a", 4200.0), ("b", 2700.0))]
    assert "slowly in b (2700 GB/s)" in gpu_report._slow_copies(cases)
    assert gpu_report._slow_copies(cases[:1]) == "" == gpu_report._slow_copies([layer_record()["cases"][0]])


def test_the_document_has_a_place_for_every_part() -> None:
    text = gpu_report.DOCUMENT.read_text()
    for name in (*gpu_parts.PARTS, "plan", "time"):
        assert f"<!-- begin gpu {name} -->" in text and f"<!-- end gpu {name} -->" in text

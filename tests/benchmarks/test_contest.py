"""Measuring and judging contenders, and measurements of the parts in toy sizes; nothing here looks at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.nn import functional

import te_fuser
from benchmarks import models
from benchmarks.gpu import __main__ as command
from benchmarks.gpu.contest import entries, libraries, measure
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.contest.entries import compared
from benchmarks.gpu.contest.goals import Goal, judged, sentence
from benchmarks.gpu.parts import cases, first_call, glue, host, train
from benchmarks.gpu.parts.floor import Heads, Product, make_floor, multiplications, work_of
from benchmarks.gpu.parts.table import PARTS
from benchmarks.gpu.record import tables
from benchmarks.models import rivals
from tests import fake_cuda
from tests.benchmarks.pretended import ABOUT, CPU, TOY, event, forked, result
from tests.needs import needs_compiler


def test_contenders_take_turns_and_change_who_begins() -> None:
    calls: list[str] = []
    steps = {name: lambda name=name: calls.append(name) for name in ("a", "b", "c")}
    results = measure.contest(steps, measure.TRIAL, CPU)
    assert calls[-6:] == ["a", "b", "c", "b", "c", "a"]
    assert all(len(r.blocks) == measure.TRIAL.rounds for r in results.values())


def test_an_effort_in_shorter_blocks_is_as_long() -> None:
    assert measure.SHORT.in_shorter_blocks(5) == measure.Effort(25, measure.SHORT.block / 5, 0.5)


def test_ratios_are_of_rounds() -> None:
    # The clock halves in the last two rounds: the ratio of the medians would be 1.6 / 2.
    assert result(0.8, 1.6, 1.6).over(result(1.0, 2.0, 2.0)) == pytest.approx(0.8)
    assert result(1.0, 3.0, 2.0).as_data()["range_ms"] == [1000.0, 3000.0]


def test_entries_know_the_best_rival_measured_or_earlier() -> None:
    case = "seed layer bf16 dropout 0.1"
    results = {"floor": result(1.0), "eager": result(1.3), "torch.compile": result(1.2), "te_fuser": result(1.1)}
    entry = compared(case, results)
    earlier = 17.90 / 15.95
    assert entry["best_rival"] == libraries.TE and entry["earlier"]["over_floor"][libraries.TE] == earlier
    assert entry["contenders"]["te_fuser"]["over_best_rival"] == pytest.approx(1.1 / earlier)
    results[libraries.TE] = result(1.25)  # it is here: what it reached earlier does not count
    entry = compared(case, results)
    assert entry["best_rival"] == "torch.compile" and "earlier" not in entry
    assert "over_best_rival" not in entry["contenders"]["eager"]


def test_a_trace_counts_kernels_and_finds_products() -> None:
    events = [
        event("at::cuda::spin_kernel(long)", -900.0, 890.0),  # what the calls queue up behind
        event("nvjet_tst_128x256", 0.0, 50.0),
        event("layer_norm_fwd", 50.0, 10.0),
        event("Memset (Device)", 60.0, 1.0, "gpu_memset"),
        event("cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 61.0, 29.0),
        event("aten::mm", 0.0, 100.0, "cpu_op"),
    ]
    trace = measure.summarized(events, repeats=2)
    assert (trace.kernels, trace.memsets) == (1.5, 0.5) and trace.span == pytest.approx(45e-6)
    assert [trace.products, trace.attention, trace.rest] == pytest.approx([25e-6, 14.5e-6, 5.5e-6])
    assert trace.names["layer_norm_fwd"] == pytest.approx((0.5, 5e-6))
    assert trace.as_data()["over_own_products"] == pytest.approx(45 / 39.5)
    with pytest.raises(RuntimeError, match="no kernel"):
        measure.summarized(events[-1:], 1)


def test_kernels_of_cutes_compiler_are_known_by_what_follows_its_name() -> None:
    kinds = {
        "kernel_cutlass_kernel_quackepiloguefrontendGemmMod_linear_act_epi": "products",
        "kernel_cutlass_kernel_quackrmsnormRMSNormBackward_object_at": "rest",
        "kernel_cutlass_kernel_flash_attncuteflash_bwd_sm90FlashAttentionBackwardSm90": "attention",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16>": "products",
    }
    assert {name: measure.kind_of(name) for name in kinds} == kinds


def test_kernels_that_begin_early_do_not_count_twice() -> None:
    events = [
        event("nvjet", 0.0, 50.0), event("layer_norm_fwd", 40.0, 20.0), event("nvjet", 70.0, 10.0),
        event("layer_norm_fwd", 75.0, 10.0),
    ]  # fmt: skip
    trace = measure.summarized(events, repeats=2)
    assert [trace.products, trace.rest, trace.span] == pytest.approx([30e-6, 7.5e-6, 42.5e-6])
    assert trace.as_data()["idle_ms"] == pytest.approx(5e-3)  # of both calls, from 60 to 70
    assert trace.order == ("nvjet", "layer_norm_fwd")
    assert measure.summarized(events[:3], repeats=3).order == ()
    assert tables.kernels_in_order(trace.as_data()) == "nvjet 30 us | layer_norm_fwd 15 us"
    assert tables.kernels_in_order({"by_name": [{"kernel": "a", "count": 2.0, "ms": 0.01}]}) == "2 x a 5 us"
    assert tables.kernels_in_order({}) == ""


def test_goals_are_judged_where_their_numbers_are() -> None:
    goals = (Goal("ms", 2.0), Goal("gbps", 3800.0, at_least=True), Goal("peak_mib", 1.0))
    found = judged(goals, {"contenders": {"te_fuser": {"ms": 1.5, "gbps": 3700.0}}})
    assert [(v["what"], v["met"]) for v in found] == [("ms", True), ("gbps", False)]
    assert sentence(found[1]) == "te_fuser gbps 3700 >= 3800 (missed)"


def test_kept_bytes_are_those_that_autograd_saves() -> None:
    x, weight = torch.randn(10, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

    def forward() -> torch.Tensor:
        y = torch.nn.functional.linear(x, weight)  # saves x and the weight
        return (y.exp() * y.view(30).view(10, 3)).sin()  # saves exp's result, y and a view of it, the product

    assert measure.kept_bytes(forward, [weight]) == 4 * (40 + 3 * 30)


def test_the_floor_has_the_products_and_the_attention_of_a_model() -> None:
    layer = models.llama(models.Attention(8, 16, sharing=2, dropout=0.1))(32, 32)
    qkv, heads, *others = work_of(layer.eager, layer.shape)
    assert (qkv, heads) == (Product(32, 32, 64), Heads(2, 16, (4, 2, 8), 0.1))
    assert others == [Product(32, 32, 32), Product(32, 32, 224), Product(32, 112, 32)]


def test_the_floor_calls_each_product_and_its_gradients() -> None:
    layers = [models.llama(models.Attention(8, 16))(32, 32) for _ in range(2)]
    eager = torch.nn.Sequential(*(layer.eager for layer in layers))
    pair = models.Pair(eager, te_fuser.Sequential(*(layer.fused for layer in layers)), layers[0].shape)
    assert make_floor(rivals(pair, torch.float32)["eager"], CPU).taken == {"torch.mm": 2 * 3 * 4}


def test_products_have_the_shapes_of_a_linear_layer() -> None:
    y, dx, dw = (m() for m in multiplications(Product(5, 3, 7), torch.float32, CPU.device))
    assert (y.shape, dx.shape, dw.shape) == ((5, 7), (5, 3), (7, 3))


# ---- other libraries


def test_earlier_runs_without_a_floor_go_by_eager() -> None:
    found = libraries.earlier_over_floor("LayerNorm-GELU MLP bf16", eager_over_floor=1.2)
    assert found[libraries.TE] == pytest.approx(10.01 / 10.26 * 1.2)
    assert libraries.earlier_over_floor("SwiGLU", 2.0)[libraries.LIGER] == pytest.approx(4247 / 4216)
    assert libraries.earlier_over_floor("something new", 1.0) == {}


def test_what_is_installed_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {"transformer_engine.pytorch": types.SimpleNamespace(LayerNorm=torch.nn.LayerNorm)})
    found = libraries.installed("LayerNorm", 8, 0.0)
    assert list(found) == [libraries.TE] and found[libraries.TE]().normalized_shape == (8,)  # type: ignore[comparison-overlap]
    assert libraries.installed("Llama layer", 8, 0.0) == {}


def have(monkeypatch: pytest.MonkeyPatch, modules: Mapping[str, object]) -> None:
    """Of the libraries' modules these are installed, and no others."""
    there = {name.partition(".")[0] for name in modules}
    monkeypatch.setattr(libraries, "_is_there", lambda package: package.partition(".")[0] in there)
    for name, module in modules.items():
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
    found = libraries.installed(case, 16, 0.0, tuned=True)
    assert list(found) == [libraries.LIGER, libraries.QUACK, libraries.QUACK_TUNED]
    for make in found.values():
        model = make().double()
        models.copy_parameters(eager.model, model)
        rival = eager.like(model)
        torch.testing.assert_close(rival.forward_and_backward(), eager.forward())
        torch.testing.assert_close([leaf.grad for leaf in rival.leaves], expected)


def test_quack_takes_part_and_tuned_only_on_demand(gpu_bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, {name: module for name, module in LIBRARIES.items() if name.startswith("quack")})
    monkeypatch.setattr(te_fuser.Sequential, "tune", lambda model, x, **options: "what was tried")
    for tune, names in ((False, [libraries.QUACK]), (True, [libraries.QUACK, libraries.QUACK_TUNED])):
        entries = list(itertools.islice(PARTS["mlp"].run(dataclasses.replace(gpu_bench, tune=tune)), 2))
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
    entry = next(PARTS["glue"].run(gpu_bench))
    assert entry["left_out"][libraries.TE] == reason and "te_fuser" in entry["contenders"]


# ---- parts, on a pretended GPU


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

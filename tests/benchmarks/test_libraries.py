"""Other libraries: which take part, that they do the same work, and what they reached earlier."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import te_fuser
from benchmarks import models
from benchmarks.gpu.contest import libraries
from benchmarks.gpu.contest.bench import Bench
from benchmarks.gpu.parts.table import PARTS
from benchmarks.models import rivals


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

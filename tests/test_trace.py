"""te_fuser.profile: a trace of a model, which stays as it was."""

from __future__ import annotations

import functools
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import te_fuser
from te_fuser import ops
from tests.threads import in_threads
from tests.twins import Around


def _names(path: Path) -> list[str]:
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [e["name"] for e in json.loads(text)["traceEvents"] if e.get("cat") == "user_annotation"]


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_steps_by_name(name: str, tmp_path: Path) -> None:
    model, x = te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 8), ops.GELU()), torch.randn(3, 8)
    path = te_fuser.profile(model, x, path=tmp_path / name, steps=2)
    assert path == tmp_path / name
    names = _names(path)
    assert names.count("forward") == names.count("backward") == 2
    plan = model.plan(x)
    for step in (*plan.forward, *plan.backward):
        assert len([n for n in names if n.startswith(f"{step.name}: ")]) >= 2, step.name
    assert "layer_norm_fwd: op 0 (LayerNorm '0')" in names, names
    assert te_fuser.profile(model, x, path=path, backward=False) == path
    assert "backward" not in _names(path)


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(8), te_fuser.Sequential(ops.Linear(8, 8), ops.Dropout(0.5)))
    x = torch.randn(3, 8)
    torch.manual_seed(1)
    model(x).sum().backward()
    kept = {n: t.clone() for n, t in model.state_dict().items()}
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    drawn = torch.get_rng_state()
    te_fuser.profile(model, x, path=tmp_path / "t.json")
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(t, kept[n]) for n, t in model.state_dict().items())
    for p, g in zip(model.parameters(), gradients, strict=True):
        assert p.grad is not None and torch.equal(p.grad, g)


def _several(m: nn.Module, given: dict[str, torch.Tensor], *, scale: float) -> dict[str, Any]:
    return {"y": m(given["x"]) * scale, "rows": len(given["x"])}


def test_inputs_and_outputs_of_any_structure(tmp_path: Path) -> None:
    model, given = Around(te_fuser.LayerNormMLP(8, 16, device="cpu"), _several), {"x": torch.randn(3, 8)}
    path = te_fuser.profile(model, given, path=tmp_path / "t.json", steps=1, scale=2.0)
    assert _names(path).count("backward") == 1
    with torch.no_grad():
        te_fuser.profile(model, given, path=path, steps=1, scale=2.0)
    assert "backward" not in _names(path)


@dataclass
class _Both:
    y: torch.Tensor
    inner: Any = None


def test_dataclasses(tmp_path: Path) -> None:
    mlp = te_fuser.LayerNormMLP(8, 16, device="cpu")
    model = Around(mlp, lambda m, given: _Both(given.y, {"z": [_Both(m(given.y))]}))
    path = te_fuser.profile(model, _Both(torch.randn(3, 8)), path=tmp_path / "t.json", steps=2)
    assert _names(path).count("backward") == 2


def test_main_grad_stays(tmp_path: Path) -> None:
    model = te_fuser.Sequential(ops.Linear(8, 8, bias=False, accumulate_into_main_grad=True))
    (weight,) = model.parameters()
    weight.main_grad = kept = torch.ones(8, 8)  # type: ignore[attr-defined]
    te_fuser.profile(model, torch.randn(3, 8), path=tmp_path / "t.json")
    assert weight.main_grad is kept and torch.equal(kept, torch.ones(8, 8))  # type: ignore[attr-defined]


def test_within_another_profiler(tmp_path: Path) -> None:
    model, x = nn.Linear(8, 8), torch.randn(3, 8)
    with torch.profiler.profile() as outer:
        model(x)
        with pytest.raises(RuntimeError, match="one runs already"):
            te_fuser.profile(model, x, path=tmp_path / "t.json")
    assert "aten::linear" in {e.name for e in outer.events()}
    assert not list(tmp_path.iterdir())


def test_threads_take_turns(tmp_path: Path) -> None:
    def run(path: Path) -> None:
        te_fuser.profile(te_fuser.Sequential(ops.LayerNorm(8), ops.Linear(8, 8)), torch.randn(3, 8), path=path)

    paths = [tmp_path / f"{k}.json" for k in range(3)]
    in_threads(*(functools.partial(run, path) for path in paths))
    assert [_names(path).count("forward") for path in paths] == [3, 3, 3]


@pytest.mark.parametrize(
    ("given", "error", "match"),
    [
        ({"model": print}, TypeError, "profile takes a torch.nn.Module, got builtin_function_or_method"),
        ({"x": 3}, TypeError, r"got no tensor: profile\(model, x\)"),
        ({"steps": 0}, ValueError, "takes a whole number from 1 on as steps, got 0"),
        ({"steps": "3"}, TypeError, "takes a whole number as steps, got '3'"),
        ({"path": "nowhere/t.json"}, FileNotFoundError, "there is no folder nowhere"),
        ({"path": ""}, IsADirectoryError, r"writes a file, and \. is a folder"),
        ({"path": "t" * 300}, OSError, "name too long"),
        ({"backward": 1}, TypeError, "backward"),
    ],
)
def test_refusals(given: dict[str, Any], error: type[Exception], match: str, tmp_path: Path) -> None:
    taken: dict[str, Any] = {"model": nn.Linear(8, 8), "x": torch.randn(3, 8), "path": tmp_path / "t.json", **given}
    with pytest.raises(error, match=match):
        te_fuser.profile(taken.pop("model"), taken.pop("x"), **taken)
    assert not list(tmp_path.iterdir())

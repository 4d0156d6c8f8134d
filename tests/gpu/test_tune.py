"""Tuning on a GPU: other schedules and algorithms give the same results, and what is kept is loaded again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import Sequential, ops
from te_fuser.fuser.tune import schedules as tuning_schedules
from te_fuser.fuser.tune import tune as tuning
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.cublaslt import tuning as tuning_products
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Recipe

GPU = torch.device("cuda")


def contests_end(ratio: float, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Whatever the clock says, of algorithms too; what is taken is kept in the folder."""

    def contest(first: object, second: object, effort: tuning.Effort) -> float:
        for call in (first, second):
            call()  # type: ignore[operator]
        return ratio

    patch.setattr(te_fuser.config, "cache_dir", folder)
    patch.setattr(tuning_products, "_SOLO_LOSS", 100.0)
    patch.setattr(tuning, "_contest_on", lambda *given: contest)


@pytest.mark.parametrize("ratio", [0.5, 1.5])
def test_tuned_models_give_the_same(ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contests_end(ratio, tmp_path, monkeypatch)
    monkeypatch.setattr(tuning_schedules, "_SOLO_GAIN", 100.0)  # whatever the clock says, some variant is tried
    torch.manual_seed(0)
    model = Sequential(ops.LayerNorm(256), ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)).to(GPU)
    x, dy = torch.randn(333, 256, device=GPU, requires_grad=True), torch.randn(333, 256, device=GPU)
    wanted = [x, *model.parameters()]

    def results() -> list[torch.Tensor]:
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]

    before = results()
    report = model.tune(x)
    schedules = [t for t in report.trials if t.place.endswith("schedule")]
    assert len(schedules) >= 3
    assert not {t.place: (t.ratio, t.reason) for t in schedules if t.ratio != ratio}
    assert all(t.taken == (ratio < 1) for t in schedules)
    assert bool(list(tmp_path.rglob("*.schedules.json"))) == (ratio < 1)
    together = [(t.ratio, t.taken) for t in report.trials if t.place == "schedules of kernels together"]
    assert together == ([(ratio, True)] if ratio < 1 else [])
    algorithms = [t for t in report.trials if t.choice.startswith("#") and t.ratio]
    assert algorithms and all(t.ratio == ratio for t in algorithms)
    assert bool(list(tmp_path.rglob("*.products.json"))) == any(t.taken for t in algorithms) == (ratio < 1)
    products.configured.cache_clear()  # as in a new process
    products.product_of.cache_clear()
    for after, exact in zip(results(), before, strict=True):
        torch.testing.assert_close(after, exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("recipe", [DelayedScaling(amax_history_len=1), Float8CurrentScaling(), Float8BlockScaling()])
def test_products_of_8_bits(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a region: what is measured moves no scales, what is taken is kept, and a new process runs by it."""
    contests_end(0.5, tmp_path, monkeypatch)
    monkeypatch.setattr(tuning, "_candidates", lambda plan, options: iter(()))
    monkeypatch.setattr(tuning, "_schedule_trials", lambda *given: [])
    torch.manual_seed(0)
    layers = ops.LayerNorm(256), ops.Linear(256, 512), ops.GELU(), ops.Linear(512, 256)
    model = Sequential(*layers).to(GPU, torch.bfloat16)
    x = torch.randn(333, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(333, 256, device=GPU, dtype=torch.bfloat16)

    def results() -> list[torch.Tensor]:
        with te_fuser.autocast(recipe=recipe):
            y = model(x)
        return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], dy)]

    for _ in range(4):  # scales are those of these data in the second call, of what it makes of them in the third
        before = results()
    with te_fuser.autocast(recipe=recipe):
        report = model.tune(x)
    tried = [t for t in report.trials if t.place.startswith("quantized")]
    assert any(t.taken for t in tried) and all(t.taken or t.reason or t.ratio for t in tried), report
    assert list(tmp_path.rglob("*.products.json"))
    products.product_of.cache_clear()  # as in a new process
    for after, exact in zip(results(), before, strict=True):
        assert (after.double() - exact.double()).norm() <= 0.02 * exact.double().norm()
    with te_fuser.autocast(recipe=recipe):
        said = " ".join(str(model.explain(x, details=True)).split())  # two products of one step are named in one row
    assert "tuned: candidate" in said, f"{report}\n{said}"

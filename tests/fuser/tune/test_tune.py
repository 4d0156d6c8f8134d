"""Tuning by measured choices: what is tried, what is taken, what stays on disk. The clock is made up here."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.tuned import OFF, ON, TunedChoices, device_name, list_key, store_for
from te_fuser.fuser.tune import check
from te_fuser.fuser.tune import tune as tuning
from te_fuser.fusions import fusion
from te_fuser.fusions.match import Cost


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)


@pytest.fixture
def slow_gelu() -> None:
    """A fusion whose price is so high that no plan takes it."""

    @fusion(forward=[ops.Bias, ops.GELU], name="slow_gelu", cost=lambda m: Cost(seconds=1.0), emits=["0.output"])
    def slow_gelu(m: fusions.FusionCall, x: torch.Tensor) -> torch.Tensor:
        biased = x + m[1 - 1].bias
        m.emit("0.output", biased)
        return torch.nn.functional.gelu(biased, approximate="tanh")


def clock(monkeypatch: pytest.MonkeyPatch, ratio: Callable[[], float]) -> None:
    """Both calls run once; `ratio` says how they compare."""

    def contest(first: Callable[[], None], second: Callable[[], None], effort: tuning.Effort) -> float:
        first()
        second()
        return ratio()

    monkeypatch.setattr(tuning, "_contest_on", lambda *given: contest)


def names(model: Sequential, x: torch.Tensor) -> list[str]:
    return [s.name for s in model.plan(x).forward]


def test_a_faster_choice_is_taken_and_kept_for_other_models(monkeypatch: pytest.MonkeyPatch, slow_gelu: None) -> None:
    def model() -> Sequential:
        torch.manual_seed(0)
        return Sequential(ops.Bias(6), ops.GELU(), ops.Linear(6, 4))

    tuned, x = model(), torch.randn(5, 6, requires_grad=True)
    y = tuned(x)
    assert "slow_gelu" not in names(tuned, x)
    clock(monkeypatch, lambda: 0.8)
    report = tuned.tune(x)
    assert ("slow_gelu 6>6", ON, True) in [(t.place, t.choice, t.taken) for t in report.trials]
    assert report.ratios == (0.8,) and "slow_gelu 6>6" in str(report)
    other = model()
    for m in (tuned, other):
        assert "slow_gelu" in names(m, x) and "slow_gelu 6>6 on" in str(m.explain(x, details=True))
        torch.testing.assert_close(m(x), y)
    assert "slow_gelu" not in names(model(), torch.randn(500, 6)), "another class of rows"
    assert "slow_gelu" not in names(model().requires_grad_(False), x.detach()), "without gradients it is another list"


def test_a_slower_choice_is_not_taken(monkeypatch: pytest.MonkeyPatch, slow_gelu: None) -> None:
    model, x = Sequential(ops.Bias(6), ops.GELU(), ops.Linear(6, 4)), torch.randn(5, 6)
    before = names(model, x)
    clock(monkeypatch, lambda: 0.999)
    report = model.tune(x)
    assert report.trials and not any(t.taken for t in report.trials) and report.ratios == (1.0,)
    assert names(model, x) == before


def test_a_choice_that_fails_is_said_and_the_others_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    @fusion(forward=[ops.GELU], name="broken_gelu", cost=lambda m: Cost(seconds=1.0))
    def broken_gelu(m: fusions.FusionCall, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("not on this device")

    model, x = Sequential(ops.GELU(), ops.Linear(64, 32)), torch.randn(128, 64)
    clock(monkeypatch, lambda: 0.9)
    report = model.tune(x)
    found = {t.place: (t.ratio, t.taken, t.reason) for t in report.trials}
    assert found["broken_gelu 64>64"] == (None, False, "fails: NotImplementedError: not on this device")
    assert found["matmul_bias 64>32"][:2] == (0.9, True)


def wrong_gelu(forward: bool) -> fusions.Fusion:
    """GELU's output, or its gradient, a tenth too large, at a price that no plan takes."""
    gelu = functools.partial(torch.nn.functional.gelu, approximate="tanh")
    if forward:

        @fusion(forward=[ops.GELU], name="wrong_gelu", cost=lambda m: Cost(seconds=1.0))
        def body(m: fusions.FusionCall, x: torch.Tensor) -> torch.Tensor:
            return gelu(x) * 1.1

    else:

        @fusion(backward=[ops.GELU], name="wrong_gelu", reads=["input"], cost=lambda m: Cost(seconds=1.0))
        def body(m: fusions.FusionCall, dy: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                x = m["input"].detach().requires_grad_()
                return torch.autograd.grad(gelu(x), x, dy)[0] * 1.1

    return body


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("forward", [True, False])
def test_a_choice_that_is_faster_and_wrong_is_refused(
    forward: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Sequential(ops.MatMul(64, 32), ops.GELU(), ops.MatMul(32, 16), ops.Dropout(0.25), memory="fast")
    x = torch.randn(128, 64, dtype=dtype, requires_grad=True)
    model.to(dtype)
    clock(monkeypatch, lambda: pytest.fail("timed"))
    entry = wrong_gelu(forward)
    with fusions.only("stretch", entry):
        report = model.tune(x)
        assert "wrong_gelu" not in [s.name for p in model.plans(x) for s in (*p.forward, *p.backward)]
    (wrong,) = report.trials
    assert (wrong.ratio, wrong.taken) == (None, False) and wrong.reason in str(report)
    assert wrong.reason.startswith("differs from the default: ") and "allowed" in wrong.reason
    assert forward or "gradient of" in wrong.reason


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_rounds_elsewhere_is_no_difference(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with and without their bias, several times over, with a gradient that goes to main_grad."""
    torch.manual_seed(3)
    kinds = [lambda: ops.LayerNorm(48), lambda: ops.Linear(48, 48), ops.GELU, lambda: ops.Dropout(0.1)]
    layers = [kind() for kind in kinds * 2]
    model = Sequential(*layers, ops.Linear(48, 24, accumulate_into_main_grad=True)).to(dtype)
    weight = model[-1].weight
    weight.main_grad = torch.ones_like(weight, dtype=torch.float32)
    x = torch.randn(256, 48, dtype=dtype, requires_grad=True)
    clock(monkeypatch, lambda: 0.9)
    report = model.tune(x)
    tried = [t for t in report.trials if not t.reason.startswith(("gives the same", "keeps"))]
    assert tried and all(t.ratio == 0.9 for t in tried), str(report)
    assert torch.equal(weight.main_grad, torch.ones_like(weight.main_grad))


@pytest.mark.parametrize(("factor", "taken"), [(1.0, True), (1.001, False)])
def test_sums_in_another_order_are_no_difference(factor: float, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias's gradient depends on the gradient that arrives, and on nothing else."""

    @fusion(backward=[ops.Bias], name="one_by_one", cost=lambda m: Cost(seconds=1.0))
    def one_by_one(m: fusions.FusionCall, dy: torch.Tensor) -> Any:
        return dy, {"0.bias": dy.cumsum(0)[-1] * factor}

    model, x = Sequential(ops.MatMul(16, 16), ops.Bias(16)), torch.randn(3000, 16, requires_grad=True)
    clock(monkeypatch, lambda: 0.9)
    with fusions.only("stretch", one_by_one):
        report = model.tune(x)
    (found,) = (t for t in report.trials if t.place.startswith("one_by_one"))
    assert found.taken == taken, found.reason
    assert taken or found.reason.startswith("differs from the default: gradient of bias")


def test_a_wrong_gradient_in_main_grad_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    @fusion(backward=[ops.MatMul], name="wrong_weight", reads=["input", "0.weight"], cost=lambda m: Cost(seconds=1.0))
    def wrong_weight(m: fusions.FusionCall, dy: torch.Tensor) -> Any:
        weight = m["0.weight"]
        model[0].weight.main_grad.add_(dy.mT @ m["input"], alpha=1.01)
        return dy @ weight, {"0.weight": torch.zeros_like(weight)}

    model = Sequential(ops.MatMul(64, 32, accumulate_into_main_grad=True))
    model[0].weight.main_grad = torch.zeros_like(model[0].weight)
    clock(monkeypatch, lambda: 0.5)
    report = model.tune(torch.randn(128, 64, requires_grad=True))
    (reason,) = (t.reason for t in report.trials if t.place.startswith("wrong_weight"))
    assert reason.startswith("differs from the default: gradient of weight of ")


def test_what_there_is_no_memory_to_compare_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are tried, and what was measured before is not lost."""

    def exhausted(*known: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(check, "neighbour", exhausted)
    wrong_gelu(forward=True)
    model, x = Sequential(ops.GELU(), ops.Linear(64, 32)), torch.randn(128, 64)
    clock(monkeypatch, lambda: 0.9)
    report = model.tune(x)
    found = {t.place.split()[0]: t for t in report.trials}
    assert found["wrong_gelu"].reason.startswith("there is no memory to compare it")
    assert not found["wrong_gelu"].taken and found["matmul_bias"].taken


def attention_of_other_masks(*behind: ops.FusableOperation) -> tuple[Sequential, torch.Tensor]:
    """A model and its input: attention's libraries draw their masks by themselves."""

    @fusion(forward=[ops.DotProductAttention], name="other_mask", cost=lambda m: Cost(seconds=1.0))
    def other_mask(m: fusions.FusionCall, x: torch.Tensor) -> torch.Tensor:
        return torch.rand(*x.shape[:-1], x.shape[-1] // 3, dtype=x.dtype)

    model = Sequential(ops.DotProductAttention(2, 8, dropout=0.5, mask="none", layout="sequence_first"), *behind)
    return model, torch.randn(4, 3, 48, dtype=torch.float64)


def test_other_random_numbers_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = attention_of_other_masks()
    clock(monkeypatch, lambda: 0.5)
    with torch.no_grad():
        report, exact = model.tune(x), model.eval().tune(x)
    (found,), (other,) = ([t for t in r.trials if t.place.startswith("other_mask")] for r in (report, exact))
    assert found.taken and found.reason.startswith("not compared: ") and f"taken; {found.reason}" in str(report)
    assert not other.taken and other.reason.startswith("differs from the default: output"), "without dropout"


def test_behind_other_random_numbers_the_rest_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials after another mask was taken are compared with results of that one."""
    model, x = attention_of_other_masks(ops.GELU())
    wrong_gelu(forward=True)
    clock(monkeypatch, lambda: 0.5)
    with torch.no_grad():
        report = model.tune(x)
    found = {t.place.split()[0]: t for t in report.trials if t.ratio or t.reason.startswith("differs")}
    assert found["other_mask"].taken and found["other_mask"].reason.startswith("not compared: ")
    assert not found["wrong_gelu"].taken and found["wrong_gelu"].reason.startswith("differs from the default: output")


def test_a_taken_fusion_may_be_left_out_and_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Sequential(ops.Linear(64, 32), ops.GELU()), torch.randn(128, 64)
    assert "matmul_bias" in names(model, x)
    clock(monkeypatch, lambda: 0.9)
    for _ in range(2):
        report = model.tune(x)
        assert ("matmul_bias 64>32", OFF, True) in [(t.place, t.choice, t.taken) for t in report.trials]
        assert "matmul_bias" not in names(model, x)
        assert "measured slower in its place" in str(model.explain(x, details=True))


def test_choices_that_are_not_faster_together_are_dropped(monkeypatch: pytest.MonkeyPatch, slow_gelu: None) -> None:
    model, x = Sequential(ops.Bias(6), ops.GELU(), ops.Dropout(0.5)), torch.randn(5, 6)
    before, ratios = names(model, x), iter([0.8, 1.01])
    clock(monkeypatch, lambda: next(ratios))
    report = model.tune(x)
    assert [(t.ratio, t.taken, t.reason) for t in report.trials if t.ratio] == [(0.8, False, "together not faster")]
    assert report.ratios == (1.0,) and names(model, x) == before


def test_the_real_clock_measures_a_ratio() -> None:
    calls: list[int] = []
    contest = tuning._contest_on(torch.device("cpu"))
    ratio = contest(lambda: calls.append(1), lambda: calls.append(2), tuning.Effort(rounds=2, seconds=1e-5))
    assert ratio > 0 and calls.count(1) and calls.count(2)


def test_the_store_survives_other_writers_and_broken_files(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "gpu.json"
    first, second = TunedChoices(path), TunedChoices(path)
    first.put("a", {"f 1>1": ON}, 0.9)
    second.put("b", {"f 2>2": OFF}, 0.8)
    assert TunedChoices(path).find("a") == {"f 1>1": ON} and TunedChoices(path).find("b") == {"f 2>2": OFF}
    for text in (
        "{",
        "[]",
        '{"format": 1}',
        '{"format": 99, "entries": {}}',
        '{"format": 1, "entries": {"a": {"places": 3}}}',
    ):
        path.write_text(text)
        assert TunedChoices(path).find("a") == {}
    TunedChoices(path).put("c", {}, 1.0)
    assert "c" in json.loads(path.read_text())["entries"]


def test_stores_are_by_device() -> None:
    device = torch.device("cpu")
    assert store_for(device_name(device)) is store_for(device_name(device))
    assert store_for(device_name(device)) is not store_for("NVIDIA H200")


def test_what_the_user_tuned_does_not_change_the_tests(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, slow_gelu: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(te_fuser.config, "cache_dir", None)
    model, x = Sequential(ops.Bias(6), ops.GELU()), torch.randn(5, 6)
    store, key = store_for(device_name(x.device)), list_key(model.plan(x).graph, "balanced", "auto")
    store.put(key, {"slow_gelu 6>6": ON}, 0.5)
    assert "slow_gelu" not in names(model, x)
    monkeypatch.setattr(te_fuser.config, "cache_dir", store.path.parents[1])
    assert "slow_gelu" in names(model, x)


def test_what_cannot_be_kept_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path / "file")
    model, x = Sequential(ops.Linear(8, 8)), torch.randn(4, 8, requires_grad=True)
    model(x)

    def measured() -> float:
        raise AssertionError

    clock(monkeypatch, measured)
    with pytest.raises(OSError, match=r"cannot be kept in .*file/tuned: .*; set te_fuser.config.cache_dir"):
        model.tune(x)


def test_ranks_that_are_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te_fuser.config, "cache_dir", tmp_path)
    model = Sequential(ops.GELU(), ops.AllReduce(ops.Group("tp", 2)))
    with pytest.raises(RuntimeError, match="torch.distributed knows no group 'tp' of 2 ranks in this process"):
        model.tune(torch.randn(4, 8))

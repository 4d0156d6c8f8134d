"""explain(), its rows and its clocks: what it says is what the plan holds, in text that fits the page."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser.graph.passes import PassRecord
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.show import measure
from te_fuser.fuser.show.measure import measured_run
from te_fuser.fuser.show.step_rows import step_rows


def mlp(**options: Any) -> te_fuser.Sequential:
    return te_fuser.Sequential(
        te_fuser.Residual(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16), ops.Dropout(0.1)),
        **{"kernels": "reference", **options},
    )


def sample() -> torch.Tensor:
    return torch.randn(6, 3, 16, requires_grad=True)


def section(text: str, title: str) -> str:
    """The lines below a title, up to the next empty one."""
    return text.split(f"\n{title}\n", 1)[1].split("\n\n", 1)[0]


def test_text_is_plain_and_fits() -> None:
    model = te_fuser.Sequential(*(mlp() for _ in range(3)))
    for text in (str(model.explain(sample(), details=True)), str(model.explain(sample(), device="h200", details=True))):
        assert max(map(len, text.splitlines())) <= 110
        assert "\x1b" not in text
        assert all(line == line.rstrip() for line in text.splitlines())


@pytest.mark.parametrize("columns", [20, 110, 160, 400])
def test_names_stay_whole_at_any_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths of ops, names of steps and of what they keep: each can be searched for and copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(64, 256, 4, params_dtype=torch.bfloat16)
        model = te_fuser.Sequential(OrderedDict(decoder_of_the_model=layer))
        x = torch.empty(32, 2, 64, dtype=torch.bfloat16, requires_grad=True)
    explanation = model.explain(x, device="h200", details=True)
    (plan,) = explanation.plans
    text = str(explanation)
    for direction in ("forward", "backward"):
        words = set(section(text, direction.capitalize()).replace(",", "").split())
        for row in step_rows(plan, direction):
            names = {word for named in (*row.covers, *row.keeps, *row.again) for word in named.split()}
            assert {row.name, *names} <= words
            assert f" {row.seconds * 1e6:.1f} {row.limit}" in text
    assert columns > 110 or max(map(len, text.splitlines())) < 150
    assert columns < 160 or max(map(len, text.splitlines())) <= columns
    assert all(whole in section(text, "Totals") for whole in ("predicted bytes", "host ms", "launches"))


@pytest.mark.parametrize("measure", [False, True])
def test_without_details_a_step_is_a_line(measure: bool) -> None:
    model = te_fuser.Sequential(*(mlp()[0] for _ in range(3)), kernels="reference")
    explanation = model.explain(sample(), measure=measure)
    text, (plan,) = str(explanation), explanation.plans
    lines = text.splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80 and "\x1b" not in text
    for direction in ("forward", "backward"):
        rows = step_rows(plan, direction)
        for row in rows:
            assert any(row.name in line.split() for line in lines), row.name
        (total,) = [line for line in lines if line.startswith(f"{direction:8} ")]
        assert f"{plan.seconds(direction) * 1e3:.3f} ms predicted" in total
        assert ("ms measured" in total) is measure
        assert f"{sum(row.launches for row in rows)} launches" in total
    assert any("times more" in line or "once more" in line for line in lines)
    assert f"{len({r.name for r in plan.refusals})} fusions considered and not taken" in text
    assert str(model.explain(sample(), details=True)) != text


def test_without_details_a_layer_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with torch.device("meta"):
        layer = te_fuser.TransformerLayer(1024, 4096, 16, params_dtype=torch.bfloat16)
        x = torch.empty(128, 8, 1024, dtype=torch.bfloat16, requires_grad=True)
    lines = str(layer.explain(x, device="h200")).splitlines()
    assert len(lines) <= 40 and max(map(len, lines)) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    wide = str(layer.explain(x, device="h200"))  # which has room for the ops, whole
    assert "MatMul layernorm_mlp.1, Bias layernorm_mlp.2, GELU layernorm_mlp.3" in wide
    with torch.no_grad():
        assert "No backward: nothing in this call needs a gradient." in str(layer.explain(x.detach(), device="h200"))


def test_a_direction_without_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty direction takes no room from ops' names; a forward that runs nothing is no missing backward."""
    monkeypatch.setenv("COLUMNS", "100")
    with torch.no_grad():
        lines = str(mlp().explain(sample(), measure=True)).splitlines()
    assert max(map(len, lines)) <= 100 and any("LayerNorm 0.0" in line for line in lines)
    assert "" not in lines
    text = str(te_fuser.Sequential(ops.Dropout(0.0)).explain(sample()))
    assert "Backward" in text and "Forward" not in text and "No backward" not in text
    assert "No backward" in str(te_fuser.Sequential().explain(sample()))


def test_repeated_layers_are_shown_once() -> None:
    few, many = (te_fuser.Sequential(*(mlp() for _ in range(n)), kernels="reference") for n in (4, 24))
    short, long = (str(m.explain(sample(), details=True)) for m in (few, many))
    assert len(long.splitlines()) <= len(short.splitlines()) + 4
    assert "... the same 4 steps 22 times more" in long
    assert len(step_rows(many.plan(sample()), "forward")) > 24


@pytest.mark.parametrize(
    ("device", "kernels", "word"), [("h200", "auto", "__global__"), ("cpu", "reference", "  load  ")]
)
def test_source_of_each_distinct_kernel(device: str, kernels: str, word: str) -> None:
    model = te_fuser.Sequential(mlp(kernels=kernels), mlp(kernels=kernels), kernels=kernels)
    explanation = model.explain(sample(), device=device, source=True, details=True)
    sources = explanation.sources()
    plan = explanation.plans[0]
    keys = plan.generated
    assert len(sources) == len(keys) and all(word in text for text in sources.values())
    printed = str(explanation)
    for text in sources.values():
        assert text.rstrip() in "\n".join(line.rstrip() for line in printed.splitlines())


def test_measuring_needs_the_device_at_hand() -> None:
    with pytest.raises(ValueError, match="leave out device='h200'"):
        mlp().explain(sample(), device="h200", measure=True, details=True)


def test_without_an_input_it_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"torch.empty of its shape will do"):
        mlp().explain(details=True)


class MadeUpTime:
    """A clock that goes on by 1 ms whenever it is read, and by what is slept; a busy machine changes nothing."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def sleep(self, seconds: float) -> None:
        self.seconds += seconds

    def perf_counter(self) -> float:
        self.sleep(0.001)
        return self.seconds


class Slow(ops.UnfusedOperation):
    """y = x, forward in 20 ms and backward in 10 ms."""

    reads = ()

    def __init__(self, clock: MadeUpTime) -> None:
        super().__init__()
        self.clock = clock

    def op_forward(self, call: Any, x: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.02)
        return x.clone()

    def op_backward(self, call: Any, dy: torch.Tensor) -> torch.Tensor:
        self.clock.sleep(0.01)
        return dy


def fuser(*parts: ops.FusableOperation) -> Fuser:
    return Fuser(parts, kernels="reference")


def test_a_slow_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = MadeUpTime()
    monkeypatch.setattr(measure, "time", clock)
    model = fuser(ops.GELU(), Slow(clock), ops.ReLU())
    plan, times, _ = measured_run(model, torch.randn(3, 4, requires_grad=True), {}, repeats=3)
    for steps, found, slept in ((plan.forward, times.forward, 0.02), (plan.backward, times.backward, 0.01)):
        assert found == pytest.approx([slept + 0.001 if s.start == 1 else 0.001 for s in steps])


def test_it_returns_what_the_call_returns() -> None:
    model, x = fuser(ops.GELU(), ops.Linear(4, 3), ops.Output("y")), torch.randn(5, 4)
    _, _, (result, named) = measured_run(model, x, {}, ("y",))
    assert torch.equal(result, model(x)) and torch.equal(named, result)


def test_named_inputs_take_part() -> None:
    model, x = fuser(ops.GELU(), ops.Add("skip")), torch.randn(5, 4)
    skip = torch.randn(5, 4, requires_grad=True)
    plan, times, result = measured_run(model, x, {"skip": skip})
    assert len(times.backward) == len(plan.backward) > 0 and skip.grad is None
    assert torch.equal(result, model(x, skip=skip))


def test_without_gradients_only_forward_is_measured() -> None:
    with torch.no_grad():
        _, times, _ = measured_run(fuser(ops.GELU(), ops.Linear(4, 4)), torch.randn(2, 4, requires_grad=True), {})
    assert times.forward and times.backward == ()


def test_the_model_itself_runs_without_clocks() -> None:
    model, x = fuser(ops.GELU(), ops.Linear(4, 4)), torch.randn(2, 4)
    before = model.prepare(x, {})[0]
    measured_run(model, x, {})
    assert model.prepare(x, {})[0] is before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    model = te_fuser.Sequential(ops.Linear(64, 64), ops.GELU(), ops.Linear(64, 64)).cuda()
    explanation = model.explain(torch.randn(128, 64, device="cuda"), measure=True, details=True)
    assert all(t > 0 for t in (*explanation.measured[0].forward, *explanation.measured[0].backward))


def mlp_8() -> Sequential:
    return Sequential(Residual(ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16)))


def entries(*texts: str) -> tuple[tuple[str, object], ...]:
    return tuple((text, object()) for text in texts)


def test_pass_record_added_removed_changed_moved() -> None:
    first = entries("a", "b", "b", "c")
    after = (first[3], *entries("b"), first[1], *entries("d"))
    record = PassRecord("some pass", "steps", first, after)
    assert (record.added, record.removed, record.changed, record.moved) == (["d"], ["a"], ["b"], True)
    same = PassRecord("none", "steps", first, first)
    assert (same.added, same.removed, same.changed, same.moved) == ([], [], [], False)


@pytest.mark.parametrize("measure", [False, True])
def test_explain_passes_of_several_plans(measure: bool) -> None:
    model = Sequential(ops.LayerNorm(16), torch.nn.Identity(), *mlp_8())
    x = torch.randn(6, 16, requires_grad=True)
    found = model.explain(x, passes=True, measure=measure, details=True)
    assert len(found.passes) == len(found.plans) == 2
    assert str(found).count("\nPasses\n") == 2
    assert "Passes" not in str(model.explain(x, measure=measure, details=True))

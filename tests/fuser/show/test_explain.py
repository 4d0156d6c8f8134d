"""explain(), its rows and its clocks: what it says is what the plan holds, in text that fits the page."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

import te_fuser
import te_fuser as te
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.passes import PassRecord
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show import measure
from te_fuser.fuser.show.measure import measured_run
from te_fuser.fuser.show.step_rows import gains, step_rows
from te_fuser.recipe import DelayedScaling, Float8BlockScaling, Recipe


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


def test_which_dimension_is_which_is_told_with_its_size() -> None:
    """Layouts and packings that could be misread are printed; equal ones once."""

    def block(**layout: Any) -> te_fuser.Residual:
        return te_fuser.Residual(
            ops.Linear(16, 32), ops.RotaryEmbedding(4, heads=4, kv_heads=2, **layout),
            ops.DotProductAttention(4, 4, kv_heads=2, **{"mask": "none", "layout": "sequence_first", **layout}),
        )  # fmt: skip

    x = torch.randn(2, 7, 16)
    text = " ".join(str(te_fuser.Sequential(block(), block(), kernels="reference").explain(x, details=True)).split())
    assert (
        "Layout: RotaryEmbedding 0.1 and 3 others like it read [sequence 2, batch 7, features 32] "
        "(layout='sequence_first'), features as 2 x [2 queries, a key, a value] of 4 (packing='interleaved')"
    ) in text
    page = te_fuser.Sequential(block(), kernels="reference").explain(x)._repr_html_()
    assert "Layout: RotaryEmbedding 0.1 and 1 other like it read [sequence 2, batch 7, features 32]" in page
    other = te_fuser.Sequential(block(layout="batch_first", packing="blocked"), kernels="reference")
    assert (
        "[batch 2, sequence 7, features 32] (layout='batch_first'), features as [4 queries | 2 keys | 2 values] of 4 "
        "(packing='blocked')"
    ) in " ".join(str(other.explain(x, details=True)).split())
    assert "Layout" not in str(mlp().explain(sample(), details=True))


class Own(te_fuser.Sequential):
    """A list with a call of its own."""

    def forward(self, x: torch.Tensor, **inputs: Any) -> Any:
        return super().forward(x, **inputs)


@pytest.mark.parametrize("measure", [False, True])
def test_what_runs_by_itself_is_named_in_its_place_with_the_reason(measure: bool) -> None:
    hooked = ops.Linear(16, 16)
    hooked.register_forward_hook(lambda *_: None)
    model = te_fuser.Sequential(
        torch.nn.BatchNorm1d(3),
        ops.LayerNorm(16),
        te_fuser.Residual(torch.nn.Linear(16, 16), torch.nn.GELU()),
        ops.ReLU(),
        Own(ops.GELU()),
        hooked,
        kernels="reference",
    )
    text = str(model.explain(sample(), measure=measure, details=True))
    assert max(map(len, text.splitlines())) <= 110
    said, first = " ".join(text.split()), "By itself, fused with nothing:"
    convert = "no op; te_fuser.from_torch(module) makes"
    wanted = (
        f"{first} 0 (BatchNorm1d): {convert} none of it: te_fuser has no op for it Plan 1 of 2: 2 ops",
        f"{first} 2.0 (Linear), 2.1 (GELU): {convert} ops of it, with its parameters Plan 2 of 2: 2 ops",
        f"{first} 4 (Own): a call of its own {first} 5 (Linear): hooks of its own",
    )
    assert said.startswith(wanted[0]) and wanted[1] in said and said.endswith(wanted[2])


def test_a_list_of_plain_modules_alone_is_explained() -> None:
    model = te_fuser.Sequential(torch.nn.LayerNorm(16), torch.nn.Linear(16, 16))
    explanation = model.explain(sample(), details=True)
    assert not explanation.plans and "0 (LayerNorm), 1 (Linear): no op; te_fuser.from_torch(module)" in str(explanation)


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


def test_explain_passes_are_all_there_in_their_order() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = mlp_8().explain(torch.randn(6, 16, requires_grad=True), passes=True, details=True)
    (records,) = found.passes
    assert [r.name for r in records] == ["list", *pipeline.LIST_PASSES, "cover", *pipeline.PLAN_PASSES]
    (cast,) = (r for r in records if r.name == "autocast")
    assert "MatMul '0.1.matmul'; reads weight in bfloat16" in cast.added and "MatMul '0.1.matmul'" in cast.removed
    text = str(found)
    assert "Passes\n" in text and "+ MatMul '0.1.matmul'; reads weight in bfloat16" in text
    (plan,), (makers,) = found.plans, found.makers
    assert [maker for _, maker in makers] == ["cover"] * len(plan.steps)
    assert f"Steps made by: cover {len(plan.steps)}" in text


def test_explain_passes_names_what_surrounds_a_call_and_who_made_a_step() -> None:
    recipe = te_fuser.recipe.Float8CurrentScaling()
    with te_fuser.autocast(recipe=recipe):
        found = mlp_8().explain(torch.randn(64, 16, requires_grad=True), passes=True, details=True)
    (records,), (makers,) = found.passes, found.makers
    around = records[len(pipeline.LIST_PASSES) + 1]
    assert around.over == "ops" and any("Quantize" in text for text in around.added)
    texts = [text for text, _ in records[-1].after]
    assert [text for text, _ in makers] == texts
    assert "cover" in {maker for _, maker in makers} <= {"cover", *pipeline.PLAN_PASSES}


@pytest.mark.parametrize("measure", [False, True])
def test_explain_passes_of_several_plans(measure: bool) -> None:
    model = Sequential(ops.LayerNorm(16), torch.nn.Identity(), *mlp_8())
    x = torch.randn(6, 16, requires_grad=True)
    found = model.explain(x, passes=True, measure=measure, details=True)
    assert len(found.passes) == len(found.plans) == 2
    assert str(found).count("\nPasses\n") == 2
    assert "Passes" not in str(model.explain(x, measure=measure, details=True))


# -------------------------------------------------------------------------------- what products of 8 bits gain


ROWS, F, FFN = 8192, 4096, 16384


def explained(recipe: Recipe | None, device: str, odd: bool = False) -> tuple[str, Plan]:
    with torch.device("meta"):
        model = te.Sequential(te.LayerNormMLP(F, FFN), *([te.Linear(F, 100)] if odd else [])).bfloat16()
        x = torch.empty(ROWS, F, dtype=torch.bfloat16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        found = model.explain(x, device=device, details=True)
    return str(found), found.plans[0]


def test_they_are_the_steps_of_the_products_beside_these_alone() -> None:
    said, plan = explained(DelayedScaling(), "h200", odd=True)
    first, second = gains(plan)
    assert (first.path, second.path) == ("0.1", "0.4") and first.dtype == second.dtype == "bfloat16"
    alone = 3 * (2.0 * ROWS * F * FFN / DEVICES["h200"].matrix_rate["bfloat16"] + 4e-6)
    assert first.own_seconds == pytest.approx(alone) and second.own_seconds == pytest.approx(alone)
    of = [s.seconds for s in plan.steps if s.cost.flops and (s.cost.dtype or "").startswith("float8")]
    assert len(of) == 6 and first.seconds + second.seconds == pytest.approx(sum(of))
    assert first.own_seconds > 1.8 * first.seconds
    line = next(line.split() for line in said.splitlines() if line.split()[:1] == ["together"])
    assert float(line[3]) == pytest.approx(1e3 * (2 * alone - sum(of)), abs=2e-3)
    assert max(map(len, said.splitlines())) <= 110


def test_products_that_stay_gain_nothing() -> None:
    _, plan = explained(DelayedScaling(override_linear_precision=(False, False, True)), "h200")
    _, whole = explained(DelayedScaling(), "h200")
    assert gains(plan)[0].seconds > 1.3 * gains(whole)[0].seconds  # dW in bfloat16 is among them
    assert gains(plan)[0].own_seconds == gains(whole)[0].own_seconds
    said, plan = explained(None, "h200")
    assert gains(plan) == [] and "Products in 8 bits" not in said


def test_what_is_emulated_loses() -> None:
    _, plan = explained(Float8BlockScaling(), "b200")
    assert all(gain.seconds > gain.own_seconds for gain in gains(plan))
    _, plan = explained(Float8BlockScaling(), "h200")
    assert all(gain.seconds < gain.own_seconds for gain in gains(plan))
    _, plan = explained(DelayedScaling(), "cpu")
    assert all(gain.seconds > gain.own_seconds for gain in gains(plan))

"""explain(), its rows, clocks and page: what they say is what the plan holds, in text that fits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import Residual, Sequential, ops
from te_fuser.fuser.graph.passes import PassRecord
from te_fuser.fuser.pipeline import Fuser
from te_fuser.fuser.show import measure
from te_fuser.fuser.show.explain import Explanation
from te_fuser.fuser.show.measure import measured_run
from te_fuser.fuser.show.step_rows import step_rows
from tests.recorded import recorded


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
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and -m gpu")
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


VOID = {"meta", "line", "polygon", "br"}
SIDES = ("forward", "backward")


class Reader(HTMLParser):
    """Elements with their attributes and text; refuses ends that close nothing open."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        return [a for t, a in self.elements if t == tag and attributes.items() <= a.items()]


def layer(**options: Any) -> te_fuser.Sequential:
    attention = ops.DotProductAttention(2, 8, mask="causal", layout="batch_first")
    return te_fuser.Sequential(
        te_fuser.Residual(ops.LayerNorm(16), ops.Linear(16, 48), attention, ops.Linear(16, 16), ops.Dropout(0.1)),
        ops.Linear(16, 64), ops.GELU(), ops.Linear(64, 16), **options,
    )  # fmt: skip


def explained(device: str | None = None, **options: Any) -> Explanation:
    found: Explanation = layer().explain(torch.randn(3, 5, 16, requires_grad=True), device=device, **options)
    return found


def bars(page: Reader) -> Iterator[tuple[float, str, str]]:
    """(share of the lane, kind, row in the table) of each."""
    shares = [a["style"] for a in page.of("li")]
    for style, link in zip(shares, page.of("a"), strict=True):
        assert style is not None and link["href"] is not None and link["class"] is not None
        yield float(style.removeprefix("flex-grow:")), link["class"], link["href"].removeprefix("#")


@pytest.mark.parametrize("options", [{}, {"measure": True}, {"device": "h200"}], ids=str)
def test_bars_are_the_steps_as_wide_as_their_time(options: dict[str, Any]) -> None:
    explanation = explained(**options)
    page = Reader(explanation._repr_html_())
    (plan,), found = explanation.plans, list(bars(page))
    rows = {a["id"] for a in page.of("tr") if "id" in a}
    assert len(found) == len(plan.forward) + len(plan.backward) == len(rows) and {row for *_, row in found} == rows
    lanes = page.of("ol")
    assert [lane["aria-label"] for lane in lanes] == ["forward", "backward"]
    first = len(plan.forward)
    for steps in (found[:first], found[first:]):
        assert sum(share for share, *_ in steps) == pytest.approx(1.0, abs=0.01)
    if "measure" not in options:
        seconds = [step.seconds for step in plan.forward]
        for (share, *_), taken in zip(found[:first], seconds, strict=True):
            assert share == pytest.approx(max(taken / sum(seconds), 1e-4), abs=1e-4)
    kinds = {kind for _, kind, _ in found}
    assert {"fusion"} < kinds <= {"fusion", "kernel", "op", "torch"}


@pytest.mark.parametrize("options", [{}, {"measure": True}, {"device": "h200"}], ids=str)
def test_it_counts_and_sums_as_the_text_does(options: dict[str, Any]) -> None:
    explanation = explained(**options)
    (plan,), words = explanation.plans, Reader(explanation._repr_html_()).words
    short, long = (str(Explanation([plan], measured=explanation.measured, details=d)) for d in (False, True))
    lines = short.splitlines()
    said = {
        name: line.removeprefix(name).strip() for line in lines for name in (*SIDES, "both") if line.startswith(name)
    }
    assert len(said) == 3 and f"Both together: {said['both']}" in words
    for side, steps in zip(SIDES, (plan.forward, plan.backward), strict=True):
        assert f"{side.capitalize()}: {said[side]}, {len(steps)} steps" in words
        assert said[side].startswith(f"{plan.seconds(side) * 1e3:.3f} ms predicted, ")
        assert said[side].endswith(f", {sum(step.cost.launches for step in steps)} launches")
    table = long.split("\nTotals\n")[1].splitlines()
    for name, *cells in (line.split() for line in table if line.split()[0] in said):
        assert cells[0] == said[name].split()[0] and cells[-1] == said[name].split()[-2]
        assert ("measured" in said[name]) is ("measure" in options) is (f"{cells[3]} ms measured" in said[name])
    fusions = len({refusal.name for refusal in plan.refusals})
    assert f"Considered and not taken: {fusions} fusions, at {len(plan.refusals)} places" in words
    assert any(line.startswith(f"{fusions} fusions considered and not taken") for line in lines)


def test_bars_of_small_calls_have_a_colour_too() -> None:
    with recorded():
        explanation = te_fuser.Sequential(ops.Linear(64, 64)).explain(
            torch.randn(16, 64, requires_grad=True), details=True
        )
    assert [kind for _, kind, _ in bars(Reader(explanation._repr_html_()))] == ["torch", "torch"]


def test_two_explanations_in_one_notebook_have_rows_of_their_own() -> None:
    explanation = explained()
    page = Reader(explanation._repr_html_() + explanation._repr_html_())
    places = [place for *_, place in bars(page)]
    assert len(set(places)) == len(places) and {a["id"] for a in page.of("tr") if "id" in a} == set(places)


def test_reasons_tensors_and_ops_are_all_there() -> None:
    explanation = explained("h200")
    (plan,) = explanation.plans
    words = set(Reader(explanation._repr_html_()).words)
    assert {refusal.reason for refusal in plan.refusals} <= words and plan.refusals
    assert {repr(node.op) for node in plan.graph.nodes} <= words
    kept = [k for k in plan.kept if k.owner == "activation" and k.bytes]
    assert {k.ref.label(plan.graph) for k in kept} <= words and kept
    assert any(word.startswith("Layout: DotProductAttention") for word in words)


def test_the_curve_of_memory_ends_where_it_began() -> None:
    """All that is kept is there where backward begins, and nothing at its end."""
    explanation = explained("h200")
    (shape,) = Reader(explanation._repr_html_()).of("polygon")
    assert shape["points"] is not None
    points = [tuple(map(float, pair.split(","))) for pair in shape["points"].split()]
    (turn,) = (float(a["x1"] or 0) for a in Reader(explanation._repr_html_()).of("line"))
    assert points[0] == (0.0, 88.0) and points[-1] == (1000.0, 88.0)
    assert min(y for _, y in points) == 4.0 and min(abs(x - turn) for x, y in points if y == 4.0) < 1.0
    assert [x for x, _ in points] == sorted(x for x, _ in points)


def test_it_needs_no_network_and_no_script(tmp_path: Path) -> None:
    path = explained().to_html(tmp_path / "plan.html")
    text = path.read_text()
    page = Reader(text.removeprefix("<!doctype html>"))
    assert not {"script", "img", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert "http" not in text and "url(" not in text and "@import" not in text
    assert all((a["href"] or "").startswith("#") for a in page.of("a"))


def test_names_are_text_and_not_tags() -> None:
    class Odd(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    Odd.__name__ = "<b>&"
    model = te_fuser.Sequential(ops.LayerNorm(16), Odd(), ops.GELU())
    explanation = model.explain(torch.randn(2, 16), details=True)
    page = Reader(explanation._repr_html_())
    assert not page.of("b") and len(page.of("h2")) == 2 and any("<b>&" in word for word in page.words)


def test_without_gradients_there_is_no_backward() -> None:
    with torch.no_grad():
        explanation = layer().eval().explain(torch.randn(3, 5, 16), details=True)
    page = Reader(explanation._repr_html_())
    assert len(page.of("ol")) == 1 and "No backward: nothing in this call needs a gradient." in page.words

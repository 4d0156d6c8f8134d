"""The page of an explanation: what stands in it, and that it needs nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.show.explain import Explanation
from tests.recorded import recorded

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

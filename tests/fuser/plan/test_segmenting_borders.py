"""Ends of kernels that let a segment end: where ranks sum gradients while others are computed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import te_fuser as te
from te_fuser import ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.plan import segmenting
from te_fuser.fuser.plan.plan import Plan
from te_fuser.recipe import DelayedScaling

F, FFN = 64, 128


def mlp() -> list[ops.FusableOperation]:
    return [ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F), ops.Dropout(0.1)]


LISTS: dict[str, Callable[[], te.Sequential]] = {
    "residuals": lambda: te.Sequential(*[te.Residual(*mlp()) for _ in range(3)]),
    "plain": lambda: te.Sequential(*mlp(), *mlp()),
    "frozen": lambda: te.Sequential(*[te.Residual(*mlp()) for _ in range(3)]).requires_grad_(False),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)


def planned(name: str, ranks: bool, region: bool, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(pipeline, "has_ranks", lambda: ranks)
    with torch.device("meta"):
        model = LISTS[name]().to(torch.bfloat16)
    x = torch.empty(256, F, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with te.autocast(enabled=region, recipe=DelayedScaling()):
        return model.plan(x, device="h200")


def cuts(plan: Plan) -> list[int]:
    return [segment.start for segment in plan.segments][1:]


def test_segments_end_where_a_branch_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind the sum of a layer, and no tensor of 8 bits passes."""
    plan = planned("residuals", True, True, monkeypatch)
    before = [plan.graph.nodes[place - 1].op.kind for place in cuts(plan)]
    assert before == [ops.Add, ops.Add]
    for segment in plan.segments:
        passing = [plan.graph.values[v] for v in (*segment.values_in, *segment.values_out)]
        assert all(v.spec.dtype == v.gradient_dtype == torch.bfloat16 for v in passing)


@pytest.mark.parametrize(("name", "ranks"), [("residuals", False), ("plain", True), ("frozen", True)])
def test_others_are_one_segment(name: str, ranks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ranks; where no value lies stored between layers; and without gradients to sum."""
    assert cuts(planned(name, ranks, True, monkeypatch)) == []


@pytest.mark.parametrize("name", LISTS)
def test_plans_outside_of_regions_are_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (planned(name, ranks, False, monkeypatch) for ranks in (False, True))
    assert cuts(one) == cuts(other) and [s.name for s in one.steps] == [s.name for s in other.steps]

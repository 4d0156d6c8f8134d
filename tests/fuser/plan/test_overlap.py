"""Steps around what ranks send: every order can run, what is kept, what waiting takes. Plans: tests/plans/passes.py."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.graph.refs import LEFT, PARAMETER_GRADIENT, STARTED, Ref
from te_fuser.fuser.plan import overlap
from te_fuser.fuser.plan.cover_steps import _over_ranks
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.overlap import awaited, seconds, started, timed, way_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.explain import Explanation
from te_fuser.fuser.show.step_rows import step_rows
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step
from te_fuser.kernels import peers
from tests.plans.passes import Branches, exchanging, gpt_branches, group, llama_branches, of_ranks, tied

H200 = DEVICES["h200"]


plan_of, tied_plan = functools.cache(of_ranks), functools.cache(tied)


def names(steps: Sequence[Step]) -> list[str]:
    """Steps in short: of a product's gradients those of weights are told apart."""
    products = {True: "dgrad", False: "wgrad"}
    return [
        f"{products[s.chain] if s.name == 'matmul_backward' else s.name.removeprefix('all_gather.')} {s.start}"
        for s in steps
    ]


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("of_tied", [False, True])
def test_every_order_can_run(memory: str, ranks: int, of_tied: bool) -> None:
    """Each step runs once, behind what makes what it reads; what is under way is held until the wait."""
    plan = tied_plan(ranks, memory) if of_tied else plan_of(ranks, memory, 2)
    assert of_tied == any(s.name == "add_gradients" and s.reads()[0].kind is PARAMETER_GRADIENT for s in plan.backward)
    for segment in plan.segments:
        for steps, given in ((segment.forward, segment.takes), (segment.backward, [k.ref for k in segment.kept])):
            there = {LEFT, *given, *(r for r in segment.arriving if r is not None)}
            under_way: dict[Ref, Step] = {}
            for step in steps:
                assert there.issuperset(step.reads()), (step.name, set(step.reads()) - there)
                if ref := started(step):
                    under_way[ref] = step
                if ref := awaited(step):
                    assert set(under_way.pop(ref).reads()) < set(step.reads())
                assert not there.intersection(step.writes())
                there.update(step.writes())
                sent = {r for start in under_way.values() for r in (*start.reads(), *start.writes())}
                assert not sent.intersection(step.task.overwritten() if isinstance(step.task, KernelTask) else ())
            assert not under_way
    assert of_tied or any(s.task.overwritten() for s in plan.backward if isinstance(s.task, KernelTask))


@pytest.mark.parametrize("of_tied", [False, True])
def test_free_steps_behind_any_start(of_tied: bool) -> None:
    """Free steps run after their inputs are made, and before their readers, whatever start is asked for."""
    plan = tied_plan(2, "fast") if of_tied else plan_of(2, "lean", 2)
    for segment in plan.segments:
        parts = overlap._StepsByFreedom.of(segment.backward, H200)
        for number, (start, _) in itertools.product(range(len(parts.free)), parts.gaps()):
            steps = parts.laid_out({number: start})
            assert sorted(map(id, steps)) == sorted(map(id, segment.backward))
            missing = {r for s in steps for r in s.writes()}
            for step in steps:
                assert missing.isdisjoint(step.reads()), (number, start, step.name)
                missing.difference_update(step.writes())


def kept(plan: Plan) -> int:
    """Everything of a call that is there until backward."""
    return sum(plan.kept_bytes(owner) for owner in ("activation", "input", "statistic"))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("made", [gpt_branches, llama_branches])
def test_lean_keeps_a_share(made: Branches, dropout: float) -> None:
    """With input, statistics and what attention saves, of 2 and 4 ranks; nothing is to be said of what is whole."""
    alone = kept(plan_of(1, "lean", 1, dropout, made))
    for ranks in (2, 4):
        plan = plan_of(ranks, "lean", 1, dropout, made)
        assert 1.0 <= kept(plan) * ranks / alone <= 1.03
        assert not [note for note in plan.notes if "each rank keeps all rows" in note]


def test_budgets_gather_again_where_they_have_to() -> None:
    fast, lean = plan_of(2, "fast"), plan_of(2, "lean")
    wide, narrow = plan_of(2, fast.kept_bytes()), plan_of(2, lean.kept_bytes())
    assert wide.kept_bytes() <= fast.kept_bytes() and not [s for s in wide.backward if "again" in s.name]
    assert narrow.kept_bytes() <= lean.kept_bytes() and [s for s in narrow.backward if "again" in s.name]


# ------------------------------------------------------------------------------------------------------ times


def way(plan: Plan) -> float:
    return way_of(next(s for s in plan.forward if started(s)), H200)


def under_way(plan: Plan, product: float) -> list[Step]:
    """A start, a step of so many seconds, and a wait."""
    start, wait = (next(s for s in plan.forward if found(s)) for found in (started, awaited))
    return [start, dataclasses.replace(plan.forward[0], seconds=product), wait]


def test_one_goes_after_the_other() -> None:
    """Two that start together take both their ways, beside a step that is as long as one and a half."""
    plan = plan_of(2, "fast", 2)
    whole, hidden = way(plan), H200.link.hidden
    start, product, wait = under_way(plan, 1.5 * way(plan))
    other = Ref(STARTED, 99)
    second = dataclasses.replace(start, outputs=(("started", other),))
    waits = dataclasses.replace(wait, inputs=(("started", other), *wait.inputs[1:]))
    steps = [start, second, product, wait, waits]
    assert seconds(steps, H200) == pytest.approx(2 * whole + 1.5 * whole - 1.5 * hidden * whole)
    assert [s.seconds for s in timed(steps, H200) if awaited(s)] == pytest.approx(
        [whole - hidden * whole, whole - 0.5 * hidden * whole]
    )


def test_memory_is_weighed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of weights that run later hold what they read; where that takes more than it gains they run at once."""
    assert "wgrad 17" in _behind_start(plan_of(2, "fast"))
    monkeypatch.setattr(overlap._Order, "peak", lambda self, steps: 2**40 * _filled(steps))
    assert "wgrad 17" not in _behind_start(plan_of.__wrapped__(2, "balanced"))
    assert "wgrad 17" in _behind_start(plan_of.__wrapped__(2, "fast"))


def _behind_start(plan: Plan) -> list[str]:
    backward = names(plan.segments[1].backward)
    at = backward.index("input_gradient.start 13")
    return backward[at : backward.index("input_gradient.wait 13")]


def _filled(steps: Sequence[Step]) -> bool:
    found = names(steps)
    return "wgrad 17" in found and found.index("wgrad 17") > found.index("dgrad 14")


def test_peaks_count_what_is_held() -> None:
    """Inputs of a weight's gradient are held until it ran, gathered ones from the gather's start on."""
    plan = plan_of(2, "fast", 2)
    segment, graph = plan.segments[1], plan.graph.rounded()
    order = overlap._Order(segment, H200, lambda ref: ref.bytes(graph))
    later = list(segment.backward)
    place = names(later).index("wgrad 17")
    at_once = [later[0], later[place], *later[1:place], *later[place + 1 :]]
    mib = 2**20
    whole, value, part = 64 * mib, 128 * mib, 32 * mib
    there = 2 * value + whole + 2 * part  # kept: two of 128 MiB, what was gathered, a sum; the gradient of that
    assert order.peak(at_once) == pytest.approx(there + whole + value, abs=mib)  # dy and dx of the second product
    assert order.peak(later) == pytest.approx(there + whole + 2 * value, abs=mib)  # also behind the row kernel


def test_plans_show_what_is_sent() -> None:
    """Starts and waits in their order, with bytes, times and what is hidden, also beside a product."""
    plan = plan_of(2, "balanced")
    shown = " ".join(str(Explanation([plan])).split())
    assert "all_gather.again.start" in shown and "computes again all_gather.output" in shown
    assert "sends 32.00 MiB, under way for 168.5 us" in shown and "62.3 us of 168.5 hidden" in shown
    beside = {row.name: row.sends for row in step_rows(exchanging(), "forward")}
    assert beside["gather_matmul"] == "sends 32.00 MiB, 80% of that time hidden beside its product"
    assert overlap.retimed(alone := plan_of(1, "balanced")) is alone


def test_a_gpu_at_hand_is_asked_whether_copies_go() -> None:
    asked = mock.patch.object(peers, "obstacle", lambda group, device: f"{group.title} has none on {device}")
    with asked, mock.patch.object(pipeline, "device_of", lambda device: H200):
        plan = te_fuser.Sequential(ops.AllGather(group()), ops.MatMul(8, 8)).plan(torch.empty(64, 8))
    assert {r.reason for r in plan.refusals if r.name == fusions.PEER_COPIES} == {"tp has none on cpu"}


def test_groups_of_one_title_are_under_way_apart() -> None:
    """Groups of two meshes, whose parameters one op has first: each waits for its own."""
    problem: Any = SimpleNamespace(nodes=[SimpleNamespace(index=0, parameters={"weight": 0, "bias": 1})])
    prices: Any = SimpleNamespace(problem=problem, step=lambda name, covers, *made: made[:2])
    found: list[Ref] = []
    for k, name in enumerate(("a", "b")):
        (_, way), (waits, _) = _over_ranks(prices, ops.Group(name, 2, "tp"), [k])
        (ref,) = [ref for _, ref in way if ref.kind is STARTED]
        assert ref in [ref for _, ref in waits]
        found.append(ref)
    assert len(set(found)) == 2

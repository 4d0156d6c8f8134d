"""The order of steps around what ranks send, what of it is kept, and what waiting takes, in plans for a GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph.refs import LEFT, PARAMETER_GRADIENT, RECOMPUTED, STARTED, VALUE, Ref
from te_fuser.fuser.plan import overlap
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.overlap import awaited, seconds, started, timed, way_of
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.explain import Explanation
from te_fuser.fuser.steps.kernel_task import KernelTask
from te_fuser.fuser.steps.step import Step
from te_fuser.recipe import DelayedScaling, Recipe
from tests.plans.models import attention_branch, llama, mlp_branch

BF16, HIDDEN, HEADS = torch.bfloat16, 4096, 32
H200 = DEVICES["h200"]


def shared(branch: te_fuser.Residual, ranks: int, sequence_parallel: bool = True) -> te_fuser.Residual:
    """A branch whose first product ranks share by column, its second by row."""
    products = [m for m in branch.modules() if isinstance(m, ops.Linear)]
    for product, mode in zip(products, ("column", "row"), strict=True):
        product.group, product.parallel_mode, product.sequence_parallel = (
            ops.Group("tp", ranks, "tp"),
            mode,
            sequence_parallel,
        )
        cut = [s // (ranks if dim == (mode == "row") else 1) for dim, s in enumerate(product.weight.shape)]
        product.weight = torch.nn.Parameter(torch.empty(cut, dtype=BF16))
        if mode == "column" and product.bias is not None:
            product.bias = torch.nn.Parameter(torch.empty(cut[0], dtype=BF16))
    return branch


def seed_branches(dropout: float) -> list[te_fuser.Residual]:
    """A GPT layer."""
    attention: Any = attention_branch(HIDDEN, HEADS, BF16, dropout)
    attention[2].dropout = dropout
    return [attention, mlp_branch(HIDDEN, BF16, dropout)]


def llama_branches(dropout: float) -> list[te_fuser.Residual]:
    """A Llama layer with eight heads of keys and values."""
    found: Any = llama(HIDDEN, HEADS, BF16, "sequence_first")
    for branch in found:
        branch.append(ops.Dropout(dropout))
    found[0][3].dropout = dropout
    return found


@functools.cache
def plan_of(
    ranks: int,
    memory: str | int,
    layers: int = 1,
    dropout: float = 0.0,
    made: Callable[[float], list[te_fuser.Residual]] = seed_branches,
    recipe: Recipe | None = None,
) -> Plan:
    """Plan of layers for an H200, 8192 tokens, whose products and exchanges are steps apart."""
    with torch.device("meta"):
        branches = [branch for _ in range(layers) for branch in made(dropout)]
        model = te_fuser.Sequential(*(shared(b, ranks) if ranks > 1 else b for b in branches), memory=memory)
        x = torch.empty(2048 // ranks, 4, HIDDEN, dtype=BF16, requires_grad=True)
    region = contextlib.nullcontext() if recipe is None else te_fuser.autocast(recipe=recipe)
    with fusions.disabled(fusions.PEER_COPIES), region:
        (plan,) = model.plans(x, device="h200")
    return plan


@functools.cache
def tied_plan(ranks: int, memory: str) -> Plan:
    """Plan of two MLPs that share their weights, whose gradients are sums of terms."""
    with torch.device("meta"):
        branch = shared(mlp_branch(1024, BF16, 0.0), ranks)
        products = list(branch.children())[1:]
        tied = [te_fuser.Residual(ops.LayerNorm(1024, dtype=BF16), *products) for _ in range(2)]
        x = torch.empty(512 // ranks, 1, 1024, dtype=BF16, requires_grad=True)
        model = te_fuser.Sequential(*tied, memory=memory)
    with fusions.disabled(fusions.PEER_COPIES):
        (plan,) = model.plans(x, device="h200")
    return plan


def names(steps: Sequence[Step]) -> list[str]:
    """Steps in short: of a product's gradients those of weights are told apart."""
    products = {True: "dgrad", False: "wgrad"}
    return [
        f"{products[s.chain] if s.name == 'matmul_backward' else s.name.removeprefix('all_gather.')} {s.start}"
        for s in steps
    ]


def test_gradients_of_weights_run_beside_what_is_sent() -> None:
    """dgrad, start, wgrad, wait: that of the same product, or one that could have run before."""
    plan = plan_of(2, "fast", 2)
    assert [(s.start, s.stop) for s in plan.segments] == [(0, 7), (7, 18), (18, 29), (29, 44)]
    assert names(plan.segments[1].backward) == [
        "dgrad 17",
        "bias_gelu_bwd 15",
        "dgrad 14",
        "input_gradient.start 13",
        "wgrad 17",
        "input_gradient.wait 13",
        "bias_add_layer_norm_bwd 8",
        "reduce_scatter.input_gradient.start 7",
        "sum_gradients.start 8",
        "wgrad 14",
        "reduce_scatter.input_gradient.wait 7",
        "sum_gradients.wait 8",
    ]


def test_sums_over_ranks_start_before_the_last_product() -> None:
    """One for each segment, of all its norms and of biases behind the sum; beside them a product runs."""
    plan = plan_of(2, "fast", 2)
    for segment in plan.segments:
        backward = names(segment.backward)
        (start,) = [k for k, name in enumerate(backward) if name.startswith("sum_gradients.start")]
        assert backward[start + 1].startswith("wgrad") and backward[-1].startswith("sum_gradients.wait")
        summed = {r.index for r in segment.backward[-1].writes()}
        terms = {r.index for r in segment.backward[start].reads() if r.kind is PARAMETER_GRADIENT}
        assert summed == terms == {p for p in segment.parameters if p in plan.graph.sums}
        assert all(r.name for r in segment.backward[start].reads() if r.kind is PARAMETER_GRADIENT)
    named = " ".join(plan.notes)
    assert "are added up over 2 ranks (tp), once a segment" in named and "not measured" not in named


def test_without_gaps_they_run_at_once() -> None:
    """Behind a row without a cut sequence nothing of the first product is under way."""
    with torch.device("meta"):
        branch = shared(mlp_branch(HIDDEN, BF16, 0.0), 2, sequence_parallel=False)
        x = torch.empty(2048, 4, HIDDEN, dtype=BF16, requires_grad=True)
    (plan,) = te_fuser.Sequential(branch, memory="fast").plans(x, device="h200")
    first, second, *_ = [name for name in names(plan.backward) if "grad " in name and "_" not in name]
    assert first.startswith("dgrad") and second == first.replace("dgrad", "wgrad")
    assert [gap for gap in names(plan.backward) if "gradient.start" in gap] == [
        "all_reduce_gradient.input_gradient.start 2"
    ]


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_every_order_can_run(memory: str, ranks: int, tied: bool) -> None:
    """Each step runs once, behind what makes what it reads; what is under way is held until the wait."""
    plan = tied_plan(ranks, memory) if tied else plan_of(ranks, memory, 2)
    assert tied == any(s.name == "add_gradients" and s.reads()[0].kind is PARAMETER_GRADIENT for s in plan.backward)
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
    assert tied or any(s.task.overwritten() for s in plan.backward if isinstance(s.task, KernelTask))


@pytest.mark.parametrize("tied", [False, True])
def test_free_steps_behind_any_start(tied: bool) -> None:
    """Free steps run after their inputs are made, and before their readers, whatever start is asked for."""
    plan = tied_plan(2, "fast") if tied else plan_of(2, "lean", 2)
    for segment in plan.segments:
        parts = overlap._StepsByFreedom.of(segment.backward, H200)
        for number, (start, _) in itertools.product(range(len(parts.free)), parts.gaps()):
            steps = parts.laid_out({number: start})
            assert sorted(map(id, steps)) == sorted(map(id, segment.backward))
            missing = {r for s in steps for r in s.writes()}
            for step in steps:
                assert missing.isdisjoint(step.reads()), (number, start, step.name)
                missing.difference_update(step.writes())


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("memory", ["balanced", "lean"])
def test_ranks_keep_their_parts(memory: str, ranks: int) -> None:
    """Ranks keep their part of one GPU's kept values; they gather others again, for gradients of weights alone."""
    alone, plan = plan_of(1, memory), plan_of(ranks, memory)
    assert plan.kept_bytes() <= 1.03 * alone.kept_bytes() / ranks
    assert not [k for k in plan.kept if k.name == "all_gather.output"]
    again = {r for s in plan.backward if s.name == "all_gather.again.wait" for r in s.writes()}
    assert len(again) == 2 and {r.kind for r in again} == {RECOMPUTED}
    readers = [s for s in plan.backward if again.intersection(s.reads()) and not awaited(s)]
    assert len(readers) == 2 and all(r.kind is PARAMETER_GRADIENT for s in readers for r in s.writes())


def kept(plan: Plan) -> int:
    """Everything of a call that is there until backward."""
    return sum(plan.kept_bytes(owner) for owner in ("activation", "input", "statistic"))


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("made", [seed_branches, llama_branches])
def test_lean_keeps_a_share(made: Callable[[float], list[te_fuser.Residual]], dropout: float) -> None:
    """With input, statistics and what attention saves, of 2 and 4 ranks; nothing is to be said of what is whole."""
    alone = kept(plan_of(1, "lean", 1, dropout, made))
    for ranks in (2, 4):
        plan = plan_of(ranks, "lean", 1, dropout, made)
        assert 1.0 <= kept(plan) * ranks / alone <= 1.03
        assert not [note for note in plan.notes if "each rank keeps all rows" in note]


def test_what_is_kept_whole_is_said() -> None:
    """Of 8 bits that are made of gathered rows each rank keeps all, transposed as products read them."""
    said = [note for note in plan_of(2, "lean", recipe=DelayedScaling()).notes if "each rank keeps all rows" in note]
    assert len(said) == 2 and all("quantize.output transposed (32.00 MiB)" in note for note in said)
    assert not [note for note in plan_of(2, "fast").notes if "each rank keeps all rows" in note]


def test_what_is_gathered_is_kept_where_memory_does_not_count() -> None:
    assert not [s for s in plan_of(2, "fast").backward if "again" in s.name]
    assert [k.name for k in plan_of(2, "fast").kept].count("all_gather.output") == 2


def test_budgets_gather_again_where_they_have_to() -> None:
    fast, lean = plan_of(2, "fast"), plan_of(2, "lean")
    wide, narrow = plan_of(2, fast.kept_bytes()), plan_of(2, lean.kept_bytes())
    assert wide.kept_bytes() <= fast.kept_bytes() and not [s for s in wide.backward if "again" in s.name]
    assert narrow.kept_bytes() <= lean.kept_bytes() and [s for s in narrow.backward if "again" in s.name]


def test_it_is_gathered_again_in_time() -> None:
    """Beside the steps before its reader, and no earlier than that takes."""
    steps = plan_of(2, "balanced", 2).segments[1].backward
    backward = names(steps)
    start, wait = backward.index("again.start 13"), backward.index("again.wait 13")
    assert backward[wait + 1] == "wgrad 14"
    assert sum(s.seconds for s in steps[start:wait]) >= way_of(steps[start], H200)
    assert sum(s.seconds for s in steps[start + 2 : wait]) < way_of(steps[start], H200)
    lean = names(plan_of(2, "lean", 2).segments[1].backward)
    assert lean[lean.index("again.start 13") - 1] == "bias_add_layer_norm_bwd 8", "which makes this rank's part again"
    assert lean.index("again.start 13") < lean.index("reduce_scatter.input_gradient.start 7")


def test_frozen_weights_gather_nothing_again() -> None:
    with torch.device("meta"):
        branch = shared(mlp_branch(HIDDEN, BF16, 0.0), 2)
        for p in branch.parameters():
            p.requires_grad_(False)
        x = torch.empty(1024, 4, HIDDEN, dtype=BF16, requires_grad=True)
    (plan,) = te_fuser.Sequential(branch, memory="lean").plans(x, device="h200")
    assert not [s for s in plan.backward if "again" in s.name]


# ------------------------------------------------------------------------------------------------------ times


def way(plan: Plan) -> float:
    return way_of(next(s for s in plan.forward if started(s)), H200)


def test_waits_take_what_is_not_hidden() -> None:
    """Nothing hides in forward; beside a product that takes longer a part of the way."""
    plan = plan_of(2, "fast", 2)
    whole = way(plan)
    assert whole == pytest.approx(8192 * 4096 / 204e9 + H200.launch)
    assert all(s.seconds == 0.0 for s in plan.steps if started(s))
    assert [s.seconds for s in plan.forward if awaited(s)] == pytest.approx([whole] * 8)
    hidden = pytest.approx(whole * (1 - H200.link.hidden))
    first, second, sums = [s for s in plan.segments[1].backward if awaited(s)]
    assert (first.seconds, second.seconds) == (hidden, hidden) and sums.seconds < 3e-5
    assert plan.seconds("backward") == pytest.approx(sum(s.seconds for s in plan.backward))


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
    """Starts and waits in their order, with bytes, times and what is hidden; what was not measured is said."""
    shown = " ".join(str(Explanation([plan_of(2, "balanced")])).split())
    assert "all_gather.again.start" in shown and "computes again all_gather.output" in shown
    assert "sends 32.00 MiB, under way for 168.5 us" in shown and "62.3 us of 168.5 hidden" in shown
    with torch.device("meta"):
        model = te_fuser.Sequential(shared(mlp_branch(HIDDEN, BF16, 0.0), 2))
        (plan,) = model.plans(torch.empty(64, 4, HIDDEN, dtype=BF16), device="b200")
    assert any("what ranks send was not measured on b200" in note for note in plan.notes)


def test_lists_without_are_as_they_were() -> None:
    plan = plan_of(1, "balanced")
    assert overlap.retimed(plan) is plan
    assert not [r for s in plan.steps for r in s.writes() if r.kind is STARTED]
    assert [r for s in plan.forward for r in s.writes() if r.kind is VALUE]

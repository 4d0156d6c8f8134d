"""Pipelines of a gathering and a product: where plans take them, and why not; tests/parallel has what they compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.graph.refs import PARAMETER, PARAMETER_GRADIENT
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.step_rows import step_rows
from te_fuser.fusions import pipeline
from te_fuser.kernels import symmetric
from te_fuser.ops.group import Group
from tests.fusions.products import autocast_on_cuda
from tests.symmetric import NAMES
from tests.symmetric import taken as wherever_they_fit

FEATURES, INNER = 4096, 16384


def group(ranks: int = 2) -> Group:
    """Ranks that this process does not know: it plans for them."""
    return Group("tp", ranks, "tp")


def shared(ranks: int = 2, dim: int = 0, **options: Any) -> te_fuser.Sequential:
    """The products of an MLP as one rank of several runs them."""
    given = {"dtype": torch.bfloat16, "device": "meta", **options}
    inner = INNER // ranks
    return te_fuser.Sequential(
        ops.RMSNorm(FEATURES, dtype=torch.bfloat16, device="meta"),
        ops.AllGather(group(ranks), dim),
        ops.MatMul(FEATURES, inner, **given),
        ops.GELU(),
        ops.MatMul(inner, FEATURES, **given),
        ops.ReduceScatter(group(ranks), dim),
        ops.GELU(),
    )


def planned(ranks: int = 2, tokens: int = 8192, memory: str = "fast", **options: Any) -> Plan:
    x = torch.empty(tokens // ranks, FEATURES, dtype=torch.bfloat16, device="meta", requires_grad=True)
    model = shared(ranks, **options)
    model.memory = memory
    return model.plan(x, device="h200")


def forced(**options: Any) -> Plan:
    """A plan that takes pipelines in both directions, whatever the prices."""
    with wherever_they_fit():
        return planned(**options)


def taken(plan: Plan) -> list[str]:
    return [s.name for s in (*plan.forward, *plan.backward) if s.name in NAMES]


def reasons(plan: Plan) -> dict[str, set[str]]:
    return {name: {r.reason for r in plan.refusals if r.name == name} for name in NAMES}


def half_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prices as if 37% of what two ranks send were not felt beside products."""
    monkeypatch.setattr(pipeline, "_BESIDE", {2: 0.37})


def test_large_products_of_two_ranks_take_them_where_that_hides_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward; in backward an exchange goes beside gradients of weights for less, which is said."""
    assert taken(planned()) == []
    half_hidden(monkeypatch)
    plan = planned()
    assert taken(plan) == ["all_gather_matmul", "matmul_reduce_scatter"]
    assert not any("gather." in s.name or "scatter." in s.name for s in plan.forward)
    for name in ("all_gather_matmul_backward", "matmul_reduce_scatter_backward"):
        assert any("us more than" in reason for reason in reasons(plan)[name])


def test_what_is_gathered_is_there_for_the_gradient_of_the_weight() -> None:
    """Of a column it is kept, of a row it is made with dx; both products of the weights are cuBLASLt's, and hang."""
    plan = forced()
    row, row_weight, column, column_weight = (s for s in plan.backward if s.name in NAMES)
    assert row.name == row_weight.name == "matmul_reduce_scatter_backward"
    assert column.name == column_weight.name == "all_gather_matmul_backward"
    forward = next(s for s in plan.forward if s.name == "all_gather_matmul")
    assert forward.writes()[1] in {k.ref for k in plan.kept} and forward.writes()[1] in column_weight.reads()
    assert row.writes()[1] in row_weight.reads()
    assert row.chain and column.chain and not row_weight.chain and not column_weight.chain
    assert row_weight.task.own_memory and column_weight.task.own_memory


def test_what_is_gathered_is_gathered_again() -> None:
    """Where this rank's part alone is kept."""
    plan = forced(memory="balanced")
    forward, wait = (next(s for s in plan.steps if s.name.endswith(n)) for n in ("all_gather_matmul", ".again.wait"))
    weight = [s for s in plan.backward if s.name == "all_gather_matmul_backward"][1]
    assert [name for name, _ in forward.outputs] == ["output"] and wait.writes()[0] in weight.reads()
    assert plan.kept_bytes() <= forced().kept_bytes() - 8192 * FEATURES


@pytest.mark.parametrize(("ranks", "tokens"), [(4, 8192), (8, 8192), (2, 256), (2, 32)])
def test_others_do_not(ranks: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More ranks lose by it, and so do small products: said with what it would take more."""
    half_hidden(monkeypatch)
    plan = planned(ranks, tokens)
    assert taken(plan) == []
    for name in ("all_gather_matmul_backward", "matmul_reduce_scatter_backward"):
        assert any("us more than" in reason for reason in reasons(plan)[name]), reasons(plan)[name]


def test_prices_say_what_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of what is gathered on two ranks; of that time 37% runs beside the product."""
    half_hidden(monkeypatch)
    step = next(s for s in planned().forward if s.name == "all_gather_matmul")
    cost, whole = step.cost, 8192 * FEATURES * 2
    assert (cost.sent, cost.ranks, cost.beside) == (whole / 2, 2, 0.37)
    device = DEVICES["h200"]
    product = cost.flops / device.matrix_rate["bfloat16"]
    rest = cost.launches * device.launch + cost.apart / device.bandwidth
    assert step.seconds == pytest.approx(product + rest + 0.63 * whole / 2 / 204e9)
    rows = {row.name: row.sends for row in step_rows(planned(), "forward")}
    assert rows["all_gather_matmul"] == "sends 32.00 MiB, 37% of that time hidden beside its product"


def test_gradients_of_weights_go_to_main_grad() -> None:
    names = taken(forced(accumulate_into_main_grad=True))[2:]
    both = ("matmul_reduce_scatter", "all_gather_matmul")
    assert names == [f"{name}_backward_main_grad" for name in both for _ in ("dx", "dW")]


def test_it_is_main_grad_of_the_weights_themselves_under_autocast() -> None:
    with autocast_on_cuda():
        plan = forced(accumulate_into_main_grad=True, dtype=torch.float32)
    steps = [s for s in plan.backward if s.name.endswith("_backward_main_grad")]
    of_weights = [s for s in steps if any(r.kind is PARAMETER_GRADIENT for r in s.writes())]
    read = [{r.form.dtype for s in some for r in s.reads() if r.kind is PARAMETER} for some in (steps, of_weights)]
    assert (len(steps), len(of_weights)) == (2, 1) and read == [{None, torch.bfloat16}, {None}]


def why(*listed: Any, shape: tuple[int, ...] = (64, 8), device: str | None = "h200") -> set[str]:
    """Why the pipelines of a list's forward are not candidates."""
    x = torch.empty(shape, device="meta" if device else "cpu")
    plan = te_fuser.Sequential(*listed).plan(x, device=device)
    return {r.reason for r in plan.refusals if r.name in ("all_gather_matmul", "matmul_reduce_scatter")}


def test_a_match_that_is_none() -> None:
    product = ops.MatMul(8, 8, device="meta")
    assert why(ops.AllGather(group(1)), product) == {"one rank exchanges nothing"}
    words = "it takes rows that ranks cut along the first dimension, and these are cut along dimension 1"
    assert why(ops.AllGather(group(), 1), product, shape=(4, 6, 8)) == {words}
    assert why(product, ops.ReduceScatter(group(), 1), shape=(4, 6, 8)) == {words}
    assert "dimension -1" in next(iter(why(product, ops.ReduceScatter(group(), -1))))
    assert "us more than" in next(iter(why(ops.AllGather(group(), -2), product)))
    on_cpu = ops.MatMul(8, 8)
    assert why(ops.AllGather(group()), on_cpu, device=None) == {"symmetric memory is of GPUs, the input is on cpu"}


def test_a_gpu_at_hand_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symmetric, "obstacle", lambda group, device: f"{group.title} has none on {device}")
    assert why(ops.AllGather(group()), ops.MatMul(8, 8), device=None) == {"tp has none on cpu"}

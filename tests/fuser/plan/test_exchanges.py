"""Exchanges by copies in plans: which step they become, what is said of the others, and what they are priced by."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.distributed.exchange import Exchange
from te_fuser.distributed.group import Group
from te_fuser.fuser.graph.refs import PARAMETER_GRADIENT
from te_fuser.fuser.plan.device import DEVICES
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.show.step_rows import step_rows
from te_fuser.fuser.steps.op_tasks import OpTask
from te_fuser.kernels import peers
from tests.fusions.products import autocast_on_cuda

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
        ops.Bias(FEATURES, dtype=torch.bfloat16, device="meta"),
    )


def planned(ranks: int = 2, memory: str = "fast", **options: Any) -> Plan:
    x = torch.empty(8192 // ranks, FEATURES, dtype=torch.bfloat16, device="meta", requires_grad=True)
    model = shared(ranks, **options)
    model.memory = memory
    return model.plan(x, device="h200")


def names(plan: Plan, direction: str) -> list[str]:
    steps = (s for s in getattr(plan, direction) if not s.name.endswith(".close"))
    return [s.name for s in steps if "gather" in s.name or "scatter" in s.name]


def why(plan: Plan) -> set[str]:
    """Reasons of exchanges that are no step with a product, or do not go by copies."""
    return {r.reason for r in plan.refusals if r.name == fusions.PEER_COPIES}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_exchange_is_one_step_with_the_product_beside_it(ranks: int) -> None:
    plan = planned(ranks)
    assert names(plan, "forward") == ["gather_matmul", "scatter_matmul"]
    assert names(plan, "backward") == ["gather_gelu_matmul_backward", "scatter_matmul_backward"]
    assert not why(plan)
    for step in plan.steps:
        if "gather" in step.name or "scatter" in step.name:
            assert step.stop - step.start in (2, 3) and step.chain
            assert step.task.own_memory == ("scatter" not in step.name or step.name.endswith(".close"))
    assert not any(s.name.startswith(("gather_", "scatter_")) for s in planned(1).steps)


def test_what_is_gathered_is_there_for_the_gradient_of_the_weight() -> None:
    """Of a column it is kept, of a row it is made with dx; both products of the weights hang."""
    plan = planned()
    forward = next(s for s in plan.forward if s.name == "gather_matmul")
    row = next(s for s in plan.backward if s.name == "gather_gelu_matmul_backward")
    gathered = [dict(s.outputs)["gathered"] for s in (forward, row)]
    assert gathered[0] in {k.ref for k in plan.kept}
    weights = [s for s in plan.backward if s.name.endswith("matmul_backward") and not s.chain]
    assert all(any(ref in s.reads() for s in weights) for ref in gathered)


def test_what_is_gathered_again_starts_and_waits_by_copies() -> None:
    """Forward keeps this rank's part alone, and no refusal is noted."""
    plan = planned(memory="balanced")
    (forward,) = (s for s in plan.forward if s.name == "gather_matmul")
    assert [name for name, _ in forward.outputs] == ["output"] and not why(plan)
    start, wait = (s for s in plan.backward if ".again." in s.name)
    assert isinstance(start.task, OpTask) and start.task.peers is not None
    assert isinstance(wait.task, OpTask) and wait.task.peers is None
    assert plan.kept_bytes() <= planned().kept_bytes() - 8192 * FEATURES


def test_prices_say_what_is_sent() -> None:
    """Half of what is gathered on two ranks; of that time a share runs beside the product."""
    plan, device = planned(), DEVICES["h200"]
    step = next(s for s in plan.forward if s.name == "gather_matmul")
    cost, whole = step.cost, 8192 * FEATURES * 2
    assert (cost.sent, cost.ranks, cost.beside) == (whole / 2, 2, device.link.beside)
    product = cost.flops / device.matrix_rate["bfloat16"]
    felt = (1 - device.link.beside) * whole / 2 / 204e9
    assert step.seconds == pytest.approx(product + device.launch + felt, rel=1e-3)
    rows = {row.name: row.sends for row in step_rows(plan, "forward")}
    assert rows["gather_matmul"] == f"sends 32.00 MiB, {device.link.beside:.0%} of that time hidden beside its product"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_kernel_adds_up_what_ranks_have_sent(ranks: int) -> None:
    """The one that alone reads that, of each rank's part; then the buffer is closed, and what is kept is no part."""
    plan = planned(ranks)
    for steps, kernel in ((plan.forward, "bias_fwd"), (plan.backward, "rms_norm_bwd")):
        at = next(k for k, s in enumerate(steps) if s.name.startswith("scatter_") and not s.name.endswith(".close"))
        parts = steps[at].writes()
        assert len(parts) == ranks + 1 and not {k.ref for k in plan.kept} & {*parts}
        reader = next(s for s in steps[at:] if parts[0] in s.reads())
        assert reader.name == kernel and {*parts[:-1]} <= {*reader.reads()}
        close = next(k for k, s in enumerate(steps) if parts[-1] in s.reads())
        assert close > steps.index(reader) and not steps[close].writes()
        pieces = reader.task.description.loads  # type: ignore[union-attr]
        assert len({load.name for load in pieces if load.name[-2:] in [f"_{r}" for r in range(ranks)]}) >= ranks


def test_a_kernel_that_gives_gradients_of_parameters_alone_reads_the_parts_before_they_are_given_back() -> None:
    """The kernel could run later, beside what is sent, if nothing were behind it."""
    norm = ops.LayerNorm(FEATURES, dtype=torch.bfloat16, device="meta")
    model = te_fuser.Sequential(norm, *[*shared()][1:], memory="balanced")
    x = torch.empty(4096, FEATURES, dtype=torch.bfloat16, device="meta")
    steps = model.plan(x, device="h200").backward
    (kernel,) = (k for k, s in enumerate(steps) if s.name == "layer_norm_bwd")
    (close,) = (k for k, s in enumerate(steps) if s.name == "scatter_matmul_backward.close")
    assert {r.kind for r in steps[kernel].writes()} == {PARAMETER_GRADIENT} and kernel < close
    assert {*steps[kernel].writes()} & {*steps[close].reads()}


def test_a_sum_that_is_kept_or_read_twice_is_a_tensor() -> None:
    """Of a list that ends with it, and of a norm that backward reads; and where it is left out by name."""
    group_, product = group(), ops.MatMul(8, 8, device="meta")
    alone = listed(product, ops.ReduceScatter(group_))
    assert [s.name for s in alone.forward] == ["scatter_matmul"]
    kept = listed(product, ops.ReduceScatter(group_), ops.LayerNorm(8, device="meta"))
    assert [s.name for s in kept.forward] == ["scatter_matmul", "layer_norm_fwd"]
    with fusions.disabled(fusions.PEER_SUMS):
        assert not any(s.name.endswith(".close") for s in planned().steps)


def test_left_out_by_name_all_are_steps_of_their_own_by_nccl() -> None:
    with fusions.disabled(fusions.PEER_COPIES):
        plan = planned()
    assert names(plan, "forward") == [
        "all_gather.start", "all_gather.wait", "reduce_scatter.start", "reduce_scatter.wait"
    ]  # fmt: skip
    assert why(plan) == {"it is disabled"}
    assert not any(getattr(s.task, "peers", None) for s in plan.steps)


def test_under_autocast_and_onto_main_grad() -> None:
    with autocast_on_cuda():
        plan = planned(accumulate_into_main_grad=True, dtype=torch.float32)
    assert names(plan, "forward")[-1] == "scatter_matmul"
    assert {"gather_matmul_main_grad", "scatter_matmul_main_grad"} & {s.name for s in plan.backward}


def listed(*listed: Any, shape: tuple[int, ...] = (64, 8), device: str | None = "h200") -> Plan:
    x = torch.empty(shape, device="meta" if device else "cpu", requires_grad=True)
    return te_fuser.Sequential(*listed).plan(x, device=device)


def test_reasons() -> None:
    product = ops.MatMul(8, 8, device="meta")
    one = "it is no step with a product: "
    along = "the blocks of ranks lie along dimension {}, not one behind the other"
    assert one + along.format(1) in why(listed(ops.AllGather(group(), 1), product, shape=(4, 6, 8)))
    assert one + along.format(-1) in why(listed(product, ops.ReduceScatter(group(), -1)))
    assert one + along.format(0) not in why(listed(ops.AllGather(group(), -2), product))
    nobody = one + "nothing here reads what is gathered"
    assert nobody in why(listed(ops.AllGather(group())))
    assert one + "gelu_fwd is no product of the rows that are gathered, by cuBLASLt" in why(
        listed(ops.AllGather(group()), ops.GELU())
    )
    heads = ops.HeadNorm(64, heads=4, norm="L2Normalization")
    assert one + "turned_heads_forward is no product of the rows that are gathered, by cuBLASLt" in why(
        listed(ops.AllGather(group()), heads, shape=(64, 2, 256))
    )
    assert one + "no product of rows by cuBLASLt makes what is scattered here" in why(
        listed(ops.GELU(), ops.ReduceScatter(group()))
    )
    assert why(listed(ops.AllReduce(group()))) == {"a sum that all ranks get is left to NCCL"}
    on_cpu = listed(ops.AllGather(group()), ops.MatMul(8, 8), device=None)
    assert next(iter(why(on_cpu))).startswith("copy engines are of GPUs, and the plan is for ")


def test_a_gpu_at_hand_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "obstacle", lambda group, device: f"{group.title} has none on {device}")
    monkeypatch.setattr("te_fuser.fuser.pipeline.device_of", lambda device: DEVICES["h200"])
    plan = te_fuser.Sequential(ops.AllGather(group()), ops.MatMul(8, 8)).plan(torch.empty(64, 8))
    assert why(plan) == {"tp has none on cpu"}


def test_a_subclass_that_starts_in_its_own_way_is_left_to_it() -> None:
    class Traced(ops.AllGather):
        def op_forward(self, call: Any, x: torch.Tensor) -> Any:
            return super().op_forward(call, x)

    assert Traced(group()).exchange(False) is None
    assert ops.AllGather(group()).exchange(False) == Exchange(join=0)
    found = [s.name for s in listed(Traced(group()), ops.MatMul(8, 8, device="meta")).forward]
    assert found == ["traced.start", "traced.wait", "matmul"]


def test_segments_end_beside_no_exchange() -> None:
    """Gradients of several layers are handed over apart, and every exchange stays with its product."""
    model = te_fuser.Sequential(*(op for _ in range(4) for op in shared()[:-1]))
    x = torch.empty(4096, FEATURES, dtype=torch.bfloat16, device="meta", requires_grad=True)
    plan = model.plan(x, device="h200")
    assert len(plan.segments) > 1
    assert names(plan, "forward") == 4 * ["gather_matmul", "scatter_matmul"]

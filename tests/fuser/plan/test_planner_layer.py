"""What the planner makes of a GPT layer: the steps, bytes and memory that an expert would choose, and how soon."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.graph.refs import RECOMPUTED
from te_fuser.fuser.plan import kernel_cache, prices, segmenting
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.kernel_task import KernelTask

MIB = 2**20


def layer(
    hidden: int, heads: int, dtype: torch.dtype = torch.float32, attention: bool = True, dropout: float = 0.1
) -> list[te_fuser.Residual]:
    """A GPT layer as two residual branches."""
    inner = hidden // heads
    first = [
        ops.Linear(hidden, 3 * hidden, dtype=dtype),
        ops.DotProductAttention(heads, inner, mask="causal", layout="sequence_first"),
    ]
    first = first if attention else [ops.Linear(hidden, hidden, dtype=dtype)]
    return [
        te_fuser.Residual(
            ops.LayerNorm(hidden, dtype=dtype), *first, ops.Linear(hidden, hidden, dtype=dtype), ops.Dropout(dropout)
        ),
        te_fuser.Residual(
            ops.LayerNorm(hidden, dtype=dtype),
            ops.Linear(hidden, 4 * hidden, dtype=dtype),
            ops.GELU(),
            ops.Linear(4 * hidden, hidden, dtype=dtype),
            ops.Dropout(dropout),
        ),
    ]


def seed_layer(memory: str | int = "balanced", layers: int = 1, attention: bool = True) -> te_fuser.Sequential:
    """hidden 4096, 32 heads, bfloat16, without memory."""
    with torch.device("meta"):
        parts = [part for _ in range(layers) for part in layer(4096, 32, torch.bfloat16, attention)]
        return te_fuser.Sequential(*parts, memory=memory)


def seed_input() -> torch.Tensor:
    """sequence 2048, batch 4, without memory."""
    return torch.empty(2048, 4, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)


def seed_plan(memory: str | int = "balanced", layers: int = 1, attention: bool = True) -> Plan:
    return seed_layer(memory, layers, attention).plan(seed_input(), device="h200")


def kinds(plan: Plan, start: int, stop: int) -> str:
    return " ".join(n.op.kind.__name__ for n in plan.graph.nodes[start:stop])


def kernels(plan: Plan, direction: str) -> list[str]:
    """What each generated kernel covers, in running order."""
    steps = plan.forward if direction == "forward" else plan.backward
    return [kinds(plan, s.start, s.stop) for s in steps if isinstance(s.task, KernelTask)]


STRETCHES = ["Bias Dropout Add Fork LayerNorm", "Bias GELU", "Bias Dropout Add"]


@pytest.mark.parametrize("attention", [True, False])
@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_one_generated_kernel_between_two_products(memory: str, attention: bool) -> None:
    plan = seed_plan(memory, attention=attention)
    # Biases before attention, before another product and before GELU are epilogues' in forward. In backward the
    # gradient of the one before attention is that of the pass which packs attention's gradients, else of a kernel of
    # its own: the library's sums of so many rows would be one too, and a slower one.
    assert kernels(plan, "forward") == ["Fork LayerNorm", *(s for s in STRETCHES if "GELU" not in s)]
    alone = [] if attention else ["Bias"]
    assert kernels(plan, "backward") == [*reversed(STRETCHES), *alone, "Fork LayerNorm"]
    assert "matmul_bias_backward" not in {s.name for s in plan.backward}


def kept_mib(plan: Plan) -> float:
    """Everything that the layer alone keeps alive: its input and its activations."""
    return (plan.kept_bytes() + plan.kept_bytes("input") + plan.kept_bytes("statistic")) / MIB


@pytest.mark.parametrize(("memory", "most"), [("balanced", 800), ("lean", 650), (700 * MIB, 764.5)])
def test_kept_bytes_of_the_seed_layer(memory: str | int, most: float) -> None:
    assert 640 <= kept_mib(seed_plan(memory)) <= most


def test_memory_costs_little_time() -> None:
    fast, balanced, lean = (seed_plan(memory).seconds() for memory in ("fast", "balanced", "lean"))
    assert fast < balanced < lean < 1.01 * fast


def recomputed(plan: Plan) -> dict[str, list[bool]]:
    found: dict[str, list[bool]] = {}
    for choice in plan.choices:
        found.setdefault(choice.value, []).append(choice.recomputed)
    return found


@pytest.mark.parametrize(
    ("memory", "gelu", "norms"), [("fast", False, False), ("balanced", True, False), ("lean", True, True)]
)
def test_what_is_computed_again(memory: str, gelu: bool, norms: bool) -> None:
    plan = seed_plan(memory)
    assert recomputed(plan) == {"gelu.output": [gelu], "layer_norm.output": [norms, norms]}
    assert not any(k.name == "dropout.output" for k in plan.kept)
    for choice in plan.choices:
        # Whatever reads it may read it from memory or make it again: that is one write of it more.
        assert choice.seconds == pytest.approx(choice.bytes / plan.device.bandwidth, rel=0.02)


def test_a_budget_is_filled() -> None:
    lean = seed_plan("lean").kept_bytes()
    room_for_one_norm = lean + 64 * MIB
    plan = seed_plan(room_for_one_norm)
    assert plan.kept_bytes() == room_for_one_norm
    assert recomputed(plan)["layer_norm.output"].count(False) == 1


def test_equal_layers_have_equal_plans() -> None:
    plan = seed_plan(layers=4)
    assert recomputed(plan) == {"gelu.output": [True] * 4, "layer_norm.output": [False] * 8}
    descriptions = {s.task.description.key for s in plan.forward if isinstance(s.task, KernelTask)}
    assert len(descriptions) == 3  # the first norm, a stretch that repeats, the last sum


def test_attention_is_predicted_for_its_own_speed() -> None:
    plan = seed_plan()
    forward = next(s for s in plan.forward if s.name == "attention_cuda_cudnn")
    backward = next(s for s in plan.backward if s.name == "attention_cuda_cudnn")
    # Measured alone on an H200: 0.259 ms, and 0.828 ms for 2.5 times the operations, before 403 MB are moved to pack.
    assert forward.seconds * 1e3 == pytest.approx(0.259, rel=0.05)
    assert backward.seconds * 1e3 == pytest.approx(0.828 + 0.096, rel=0.05)
    assert backward.cost.flops == 2.5 * forward.cost.flops


def test_emitted_tensors_are_counted() -> None:
    kept = {k.name.rpartition(": ")[2]: k.bytes for k in seed_plan().kept}
    assert kept["cudnn_logsumexp"] == 4 * 32 * 2048 * 4
    explicit = te_fuser.Sequential(
        ops.DotProductAttention(2, 4, dropout=0.1, mask="none", layout="sequence_first"),
        kernels="reference",
        memory="fast",
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x = torch.randn(5, 3, 24, dtype=dtype, requires_grad=True)
        plan = explicit.plan(x)
        size = 3 * 2 * 5 * (8 if dtype == torch.float64 else 4)
        assert {k.name.rpartition(": ")[2]: k.bytes for k in plan.kept}["logsumexp"] == size
        # Backward reads it beside dy, x and the seed, and goes over its scratch twice.
        scratch = 2 * explicit[0].scratch_bytes(plan.x)
        assert plan.backward[0].cost.read == size + x.nbytes // 3 + x.nbytes + 16 + scratch


def test_segments_end_where_gradients_pile_up() -> None:
    plan = seed_plan(layers=2)
    assert plan.segments[0].start == 0 and plan.segments[-1].stop == len(plan.graph.nodes)
    assert len(plan.segments) == 6  # the last bias is in that of the product before it
    for start, stop in ((s.start, s.stop) for s in plan.segments[1:]):
        beside = plan.graph.nodes[start - 1 : start + 1]
        assert any(n.op.kind is ops.MatMul for n in beside)
        made = {r for s in plan.backward if start <= s.start < stop for r in s.writes()}
        again = {r for s in plan.backward if start <= s.start < stop for r in s.reads() if r.kind is RECOMPUTED}
        assert again <= made


def gradients(model: te_fuser.Sequential, x: torch.Tensor, reference: bool) -> list[torch.Tensor]:
    torch.manual_seed(3)
    y = model.reference(x) if reference else model(x)
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    return [y, *torch.autograd.grad(y, [x, *model.parameters()], dy)]


@pytest.mark.parametrize(
    ("memory", "segment_bytes"),
    [(memory, size) for memory in ("fast", "lean") for size in (25 * MIB, 40_000, 1)] + [("balanced", 40_000), (10, 1)],
)
def test_every_plan_computes_the_same(memory: str | int, segment_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segmenting, "SEGMENT_BYTES", segment_bytes)
    monkeypatch.setattr(segmenting, "WORTH_A_NODE", 0)
    torch.manual_seed(0)
    model = te_fuser.Sequential(*layer(64, 4), *layer(64, 4), memory=memory, kernels="reference").double()
    x = torch.randn(16, 3, 64, dtype=torch.float64, requires_grad=True)
    # As planned for a GPU, where nothing is kept that can be made again: the reference's own plans keep more.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("te_fuser.fuser.plan.prices.kernel_cost", _as_generated)
        for fused, meant in zip(gradients(model, x, False), gradients(model, x, True), strict=True):
            torch.testing.assert_close(fused, meant, rtol=1e-9, atol=1e-9)
        plan = model.plan(x)
    assert len(plan.segments) == 1 if segment_bytes == 25 * MIB else len(plan.segments) > 1


_kernel_cost = prices.kernel_cost


def _as_generated(description: object, rows: int, samples: int, generated: bool) -> object:
    return _kernel_cost(description, rows, samples, True)  # type: ignore[arg-type]


def test_planning_allocates_nothing() -> None:
    model = seed_layer()
    model.explain(seed_input(), device="h200", details=True)
    assert all(p.device.type == "meta" for p in model.parameters())
    with pytest.raises(TypeError, match="has no values"):
        model(seed_input())


def _calls(model: te_fuser.Sequential) -> int:
    """How many Python functions planning calls: its time, but the same on every machine, however busy."""
    count = 0

    def see(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        model.plan(seed_input(), device="h200")
    finally:
        sys.setprofile(before)
    return count


def test_planning_is_fast() -> None:
    # 62,000 calls for a layer that is new, 46,000 for a known one, 12,500 for any other.
    seed_plan()
    kernel_cache.forget()
    assert _calls(seed_layer()) < 68_000
    one, six = _calls(seed_layer()), _calls(seed_layer(layers=6))
    assert one < 50_000
    assert six < 2.6 * one


def test_a_copied_model_has_the_same_plan() -> None:
    model = seed_layer()
    first, second = (m.plan(seed_input(), device="h200") for m in (model, copy.deepcopy(model)))
    assert [s.name for s in first.backward] == [s.name for s in second.backward]
    assert first.kept_bytes() == second.kept_bytes()

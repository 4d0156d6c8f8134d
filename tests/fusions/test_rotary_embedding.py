"""RotaryEmbedding's kernel in plans for a GPU: where it is taken, with what, and what is said where it is not."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.verify.report import VerificationError
from tests.twins import sequential, tensor

HEADS, DIM = 4, 16
FEATURES = 3 * HEADS * DIM


def rotary(**options: object) -> ops.RotaryEmbedding:
    return ops.RotaryEmbedding(DIM, heads=HEADS, **options)  # type: ignore[arg-type]


def attention(**options: object) -> ops.DotProductAttention:
    return ops.DotProductAttention(HEADS, DIM, mask="causal", **{"layout": "sequence_first", **options})  # type: ignore[arg-type]


def plan(*parts: torch.nn.Module, dtype: torch.dtype = torch.bfloat16, **options: object) -> Plan:
    x = tensor(1024, 4, FEATURES, dtype=dtype).requires_grad_()
    model = te_fuser.Sequential(ops.Bias(FEATURES), *parts, **options).to(dtype)
    return model.plan(x, device="h200")


def covered(p: Plan, direction: str) -> dict[str, tuple[int, int]]:
    return {s.name: (s.start, s.stop) for s in (p.forward if direction == "forward" else p.backward)}


def test_the_bias_before_it_is_added_in_the_same_pass() -> None:
    p = plan(rotary())
    assert covered(p, "forward")["rotary_embedding_forward"] == (0, 2)
    assert covered(p, "backward")["rotary_embedding_backward"] == (0, 2)
    (step,) = (s for s in p.backward if s.name == "rotary_embedding_backward")
    assert [name for name, _ in step.outputs] == ["input", "0.bias"]
    size = 1024 * 4 * FEATURES * 2
    assert (step.cost.read, step.cost.written, step.cost.launches) == (size, size, 1)
    assert p.kept_bytes() == 0


def test_without_a_bias_it_is_one_pass_too() -> None:
    p = plan(ops.SiLU(), rotary())
    assert covered(p, "forward")["rotary_embedding_forward"] == (2, 3)
    assert covered(p, "backward")["rotary_embedding_backward"] == (2, 3)


def test_before_attention_it_turns_back_where_gradients_are_packed() -> None:
    p = plan(rotary(), attention())
    assert covered(p, "forward")["rotary_embedding_forward"] == (0, 2)
    assert covered(p, "forward")["attention_cuda_cudnn"] == (2, 3)
    assert covered(p, "backward")["attention_cuda_cudnn"] == (0, 3)
    assert "rotary_embedding_backward" not in covered(p, "backward")
    kept = {k.name: k.bytes for k in p.kept if k.owner == "activation"}
    assert kept["rotary_embedding.output"] == 1024 * 4 * FEATURES * 2 and "bias.output" not in kept


def test_a_bias_before_attention_gets_its_gradient_where_gradients_are_packed() -> None:
    p = plan(attention(dropout=0.1))
    assert covered(p, "forward")["bias_fwd"] == (0, 1)
    assert covered(p, "backward")["attention_cuda_cudnn"] == (0, 2)


def test_frozen_parameters_need_no_sums() -> None:
    model = te_fuser.Sequential(ops.Bias(FEATURES), rotary(), attention()).to(torch.bfloat16)
    model[0].bias.requires_grad_(False)
    p = model.plan(tensor(1024, 4, FEATURES, dtype=torch.bfloat16).requires_grad_(), device="h200")
    (step,) = (s for s in p.backward if s.name == "attention_cuda_cudnn")
    assert [name for name, _ in step.outputs] == ["input"]


def reasons(p: Plan, name: str, start: int) -> set[str]:
    return {r.reason for r in p.refusals if r.name == name and r.start == start}


def test_heads_that_lie_differently() -> None:
    p = plan(rotary(), attention(packing="blocked"))
    assert covered(p, "backward")["attention_cuda_cudnn"] == (2, 3)
    assert covered(p, "backward")["rotary_embedding_backward"] == (0, 2)
    (reason,) = reasons(p, "attention_cuda_cudnn", 0)
    assert "it turns heads that lie as PackedHeads(heads=4, kv_heads=4, head_dim=16, layout='sequence_first'" in reason


@pytest.mark.parametrize("options", [{"kernels": "reference"}, {"dtype": torch.float64}])
def test_plans_without_generated_kernels(options: dict[str, object]) -> None:
    p = plan(rotary(), **options)  # type: ignore[arg-type]
    assert covered(p, "forward")["rotary_embedding"] == (1, 2)  # the op itself
    for name, start in (("rotary_embedding_forward", 0), ("rotary_embedding_backward", 1)):
        (reason,) = reasons(p, name, start)
        assert reason.endswith("this plan is one without generated kernels")


def test_on_a_cpu_the_op_runs_itself() -> None:
    model, x = sequential(rotary()), tensor(5, 2, FEATURES)
    assert [s.task.what for s in model.plan(x).forward] == ["op"]
    assert reasons(model.plan(x), "rotary_embedding_forward", 0) == {"it runs on cuda, the input is on cpu"}


def test_verify_says_why_it_was_not_taken() -> None:
    with pytest.raises(VerificationError, match="it runs on cuda, the input is on cpu"):
        te_fuser.verify(te_fuser.fusions.get("rotary_embedding_forward"))

"""A residual sum as the product's addend, where nothing is dropped; ReLU at the end of a product."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import ops
from tests.fusions.products import covered, plan, reasons


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dropout", [True, False])
def test_one_product_for_the_sum(bias: bool, dropout: bool) -> None:
    inner = [ops.Linear(4096, 4096, bias=bias, device="meta"), *([ops.Dropout(0.0)] if dropout else [])]
    p = plan(te_fuser.Residual(*inner))
    name = f"matmul_add{'_bias' * bias}{'_dropout' * dropout}"
    assert [(s.name, s.stop - s.start) for s in p.forward][-1] == (name, 2 + bias + dropout)
    assert len([s for s in p.forward if s.cost.launches]) == 1


def test_dropout_that_drops_is_the_kernels() -> None:
    p = plan(te_fuser.Residual(ops.Linear(4096, 4096, device="meta"), ops.Dropout(0.1)))
    assert reasons(p, "matmul_add_bias_dropout") == {"an epilogue drops nothing, and this Dropout does"}


def test_the_sum_is_of_one_dtype() -> None:
    model = te_fuser.Sequential(ops.MatMul(64, 64), ops.Add("other")).to("meta", torch.bfloat16)
    x = torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    p = model.plan(x, device="h200", other=x.detach().float())
    assert reasons(p, "matmul_add") == {"what is added is in torch.float32, the product in torch.bfloat16"}
    assert "matmul_add" in [s.name for s in model.plan(x, device="h200", other=x.detach()).forward]


def test_what_is_added_is_left_as_it_is() -> None:
    """It is read as a tensor of its own: the sum is another one, whoever reads the addend after that."""
    p = plan(
        te_fuser.Sequential(
            te_fuser.Residual(ops.Linear(4096, 4096, device="meta")),
            ops.Output("sum"),
            ops.Linear(4096, 4096, device="meta"),
        )
    )
    (step,) = (s for s in p.forward if s.name == "matmul_add_bias")
    addend = dict(step.inputs)["2.other"] if "2.other" in dict(step.inputs) else dict(step.inputs)["input"]
    assert dict(step.outputs)["output"] != addend
    assert covered(p.forward)[-1][0] == "matmul_bias"


# ---- matmul_bias_relu -----------------------------------------------------------------------------------------------


def test_relu_without_a_backward() -> None:
    p = plan(ops.Linear(4096, 4096, device="meta"), ops.ReLU(), grad=False)
    assert covered(p.forward) == [("matmul_bias_relu", 0, 3)]


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_of_relu_with_a_backward_only_the_output_is_kept(memory: str) -> None:
    p = plan(ops.Linear(4096, 16384, device="meta"), ops.ReLU(), ops.Linear(16384, 4096, device="meta"), memory=memory)
    assert covered(p.forward)[0] == ("matmul_bias_relu", 0, 3)
    assert [k.name for k in p.kept if k.owner == "activation"] == ["relu.output"]


def test_reasons_of_relu() -> None:
    assert reasons(plan(ops.Linear(64, 64), ops.ReLU(), features=64, device=None, grad=False), "matmul_bias_relu") == {
        "cuBLASLt runs on cuda, the input is on cpu"
    }

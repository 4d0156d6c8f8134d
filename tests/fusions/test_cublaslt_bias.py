"""matmul_bias: taken where weight and bias agree, right in every dtype, and out of the way where it cannot be."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions.cublaslt import linear_bias
from te_fuser.kernels.cublaslt import products
from tests.fusions.products import plan
from tests.twins import assert_as_meant, sequential, tensor


def forward_steps(model, x):
    return [s.name for s in model.plan(x).forward]


def reasons(model, x):
    return [r.reason for r in model.plan(x).refusals if r.name == "matmul_bias"]


@pytest.mark.parametrize("rows", [(), (5,), (2, 3), (0,), (2, 0)])
def test_is_one_library_call(rows):
    model, x = sequential(ops.Linear(8, 16)), tensor(*rows, 8)
    assert forward_steps(model, x) == ["matmul_bias"]
    assert_as_meant(model, x)
    torch.testing.assert_close(model(x), F.linear(x, model[0].weight, model[0].bias))


def test_is_declared_like_any_other():
    entry = fusions.get("matmul_bias")
    assert repr(entry) == "<fusion 'matmul_bias' forward: MatMul, Bias>" and entry.doc
    with fusions.disabled("matmul_bias"):
        assert forward_steps(sequential(ops.Linear(8, 8)), tensor(5, 8)) == ["mat_mul", "bias_fwd"]


def test_without_a_bias_there_is_nothing_to_fuse():
    assert forward_steps(sequential(ops.Linear(8, 8, bias=False), ops.GELU()), tensor(5, 8)) == ["mat_mul", "gelu_fwd"]


def test_separate_ops_are_fused_too():
    model = sequential(ops.MatMul(8, 16), ops.Bias(16))
    assert forward_steps(model, tensor(5, 8)) == ["matmul_bias"]
    assert_as_meant(model, tensor(5, 8))


def test_a_product_that_somebody_reads_before_its_bias():
    model = sequential(ops.MatMul(8, 8), ops.Output("product"), ops.Bias(8))
    x = tensor(5, 8)
    assert "matmul_bias" not in [s.name for s in model.plan(x, outputs=("product",)).forward]
    assert_as_meant(model, x, ("product",))


def test_a_bias_in_float32_beside_a_weight_in_bfloat16():
    model = sequential(ops.Linear(8, 8), dtype=torch.bfloat16)
    model[0].bias = nn.Parameter(model[0].bias.detach().float())
    x = tensor(64, 8, dtype=torch.bfloat16)
    assert reasons(model, x) == ["weight and bias differ in dtype"]
    y = model(x)
    exact = F.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    assert y.dtype == torch.bfloat16
    assert (y - exact).abs().max() <= 0.02 * exact.abs().max()
    assert [g.dtype for g in torch.autograd.grad(y.sum(), [x, *model.parameters()])] == [torch.bfloat16] * 2 + [
        torch.float32
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_good_as_torch(dtype):
    model = sequential(ops.Linear(32, 16), dtype=dtype)
    x = tensor(40, 32, dtype=dtype)
    assert forward_steps(model, x) == ["matmul_bias"]
    y, torchs = model(x), F.linear(x, model[0].weight, model[0].bias)
    exact = F.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= 2 * (torchs.double() - exact).abs().max() + ulp


# ---- on a GPU ---------------------------------------------------------------------------------------------------


def bodies(p):
    return [s.task.body.function for s in p.forward if s.name == "matmul_bias"]


def test_on_a_gpu_the_product_is_cublaslts():
    (body,) = bodies(plan(ops.Linear(4096, 4096)))
    assert body.__self__ is products.configured("forward_bias", torch.bfloat16, torch.bfloat16)
    assert bodies(plan(ops.Linear(64, 64), features=64, rows=8, device=None)) == [linear_bias]  # of bfloat16
    assert bodies(plan(ops.Linear(64, 64), features=64, dtype=torch.float64)) == [F.linear]


def test_the_gradient_of_a_bias_that_no_kernel_makes_on_its_way():
    p = plan(ops.SiLU(), ops.Linear(256, 256), features=256, rows=16)
    assert [s.name for s in p.backward] == ["matmul_bias_backward", "silu_bwd", "matmul_bias_backward"]
    made = {name for s in p.backward for name, _ in s.outputs if s.name == "matmul_bias_backward"}
    assert made == {"input", "0.weight", "1.bias"}


def test_of_many_rows_a_generated_kernel_adds_up_faster_than_the_librarys():
    p = plan(ops.SiLU(), ops.Linear(4096, 4096))
    assert [s.name for s in p.backward] == ["bias_bwd", "matmul_backward", "silu_bwd", "matmul_backward"]
    (why,) = {r.reason for r in p.refusals if r.name == "matmul_bias_backward"}
    assert "us more than" in why


def test_beside_an_activation_its_kernel_makes_it():
    p = plan(ops.Linear(4096, 4096), ops.SiLU())
    assert [s.name for s in p.backward][0] == "bias_silu_bwd"
    (why,) = {r.reason for r in p.refusals if r.name == "matmul_bias_backward"}
    assert "us more than" in why


def test_a_bias_alone_needs_no_product():
    model = te_fuser.Sequential(ops.Linear(64, 64)).to("meta", torch.bfloat16)
    model[0].weight.requires_grad_(False)
    p = model.plan(torch.empty(16, 64, dtype=torch.bfloat16, device="meta"), device="h200")
    why = "nobody needs the gradient of 0.weight, which it makes with 1.bias"
    assert {r.reason for r in p.refusals if r.name == "matmul_bias_backward"} == {why}

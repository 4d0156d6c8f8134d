"""The rows of cuBLASLt's: what they say of their products, main_grad, and that these are right; taken in plans.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import cublaslt
from te_fuser.fusions.cublaslt import put_weight_gradient
from te_fuser.kernels.cublaslt.products import configured
from tests.fusions.products import library_on_the_cpu, plan, reasons
from tests.twins import assert_as_meant, sequential, tensor

ROWS = cublaslt._ROWS
BF16 = torch.bfloat16


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_of_a_product_says_what_it_reads_and_makes(row: cublaslt.ProductRow) -> None:
    """As the native products know it: an output, and then what their epilogues read or write beside it."""
    entry = fusions.get(row.name)
    assert entry.direction == row.direction and entry.doc == row.doc and row.doc.endswith(".")
    kinds = [(row.forward, row.takes, entry.gives)] if row.forward else []
    read = {node: [name for name in node.reads if name not in node.by_attributes] for node in row.backward}
    kinds += [(node.method, ("dy", *read[node]), node.produces) for node in row.backward]
    for kind, reads, makes in kinds:
        product = configured(kind, BF16, BF16)
        given = len(reads) + len(makes)
        assert given == len(product.arguments), (kind, reads, makes)


def bodies(p: Plan, *names: str) -> list[Any]:
    """Functions that steps of these fusions run."""
    return [s.task.body.function for s in (*p.forward, *p.backward) if s.name in names]  # type: ignore[union-attr]


def test_body_of_a_match_is_the_product_of_its_dtype() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        found = bodies(plan(ops.MatMul(64, 64), features=64, dtype=dtype), "matmul", "matmul_backward")
        assert [b.__self__ for b in found] == [configured(kind, dtype, dtype) for kind in ("forward", "dgrad", "wgrad")]
    (body,) = bodies(plan(ops.Linear(64, 64), features=64), "matmul_bias")
    assert body.__self__ is configured("forward_bias", BF16, BF16)
    on_cpu = plan(ops.Linear(64, 64), features=64, rows=8, device=None)
    assert bodies(on_cpu, "matmul_bias") == [cublaslt.linear_bias]  # of bfloat16
    wide = plan(ops.Linear(64, 64), features=64, dtype=torch.float64)
    assert bodies(wide, "matmul_bias") == [F.linear]


# ---- matmul_bias, on a CPU too ---------------------------------------------------------------------------------------


def forward_steps(model: Sequential, x: torch.Tensor, **how: Any) -> list[str]:
    return [s.name for s in model.plan(x, **how).forward]


@pytest.mark.parametrize("rows", [(), (5,), (2, 3), (0,), (2, 0)])
def test_matmul_bias_of_any_rows_is_one_call_and_right(rows: tuple[int, ...]) -> None:
    for parts in ([ops.Linear(8, 16)], [ops.MatMul(8, 16), ops.Bias(16)]):
        model, x = sequential(*parts), tensor(*rows, 8)
        assert forward_steps(model, x) == ["matmul_bias"]
        (y,) = assert_as_meant(model, x)
        torch.testing.assert_close(y, F.linear(x, *model.parameters()))


def test_matmul_bias_disabled_without_a_bias_read_between_or_of_two_dtypes_is_not_taken() -> None:
    entry = fusions.get("matmul_bias")
    assert repr(entry) == "<fusion 'matmul_bias' forward: MatMul, Bias>" and entry.doc
    with fusions.disabled("matmul_bias"):
        assert forward_steps(sequential(ops.Linear(8, 8)), tensor(5, 8)) == ["mat_mul", "bias_fwd"]
    alone = sequential(ops.Linear(8, 8, bias=False), ops.GELU())
    assert forward_steps(alone, tensor(5, 8)) == ["mat_mul", "gelu_fwd"]
    model, x = sequential(ops.MatMul(8, 8), ops.Output("product"), ops.Bias(8)), tensor(5, 8)
    assert "matmul_bias" not in forward_steps(model, x, outputs=("product",))
    assert_as_meant(model, x, ("product",))
    model = sequential(ops.Linear(8, 8), dtype=BF16)
    model[0].bias = torch.nn.Parameter(model[0].bias.detach().float())
    x = tensor(64, 8, dtype=BF16)
    assert reasons(model.plan(x), "matmul_bias") == {"weight and bias differ in dtype"}
    y = model(x)
    exact = F.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    assert y.dtype == BF16 and (y - exact).abs().max() <= 0.02 * exact.abs().max()
    gradients = torch.autograd.grad(y.sum(), [x, *model.parameters()])
    assert [g.dtype for g in gradients] == [BF16, BF16, torch.float32]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_matmul_bias_in_low_precision_is_as_good_as_torch(dtype: torch.dtype) -> None:
    model = sequential(ops.Linear(32, 16), dtype=dtype)
    x = tensor(40, 32, dtype=dtype)
    assert forward_steps(model, x) == ["matmul_bias"]
    y, torchs = model(x), F.linear(x, model[0].weight, model[0].bias)
    exact = F.linear(x.double(), model[0].weight.double(), model[0].bias.double())
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    assert (y.double() - exact).abs().max() <= 2 * (torchs.double() - exact).abs().max() + ulp


class Product(torch.autograd.Function):
    """x W^T, whose weight's gradient the fusion's body makes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return dy @ weight, put_weight_gradient(dy, x, weight)


@pytest.mark.parametrize("over", [True, False])
def test_the_products_of_a_backward_add_up(over: bool) -> None:
    weight, x = torch.nn.Parameter(torch.randn(8, 8) / 4), torch.randn(16, 8)
    (dw,) = torch.autograd.grad((x @ weight.t() @ weight.t()).sum(), weight)
    weight.main_grad = torch.full((8, 8), torch.nan if over else 1.0)
    weight.overwrite_main_grad, weight.grad_added_to_main_grad = over, False
    with library_on_the_cpu() as fake:
        for times in (1, 2):
            Product.apply(Product.apply(x, weight), weight).sum().backward()
            assert weight.grad_added_to_main_grad and weight.grad.shape == weight.shape and not weight.grad.any()
            torch.testing.assert_close(weight.main_grad, dw if over else 1 + times * dw, rtol=1e-4, atol=1e-4)
        assert fake.products == 4

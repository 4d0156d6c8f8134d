"""matmul_main_grad: the body with cuBLASLt imitated or replaced; plans and flags are in tests/ops/test_main_grad.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from te_fuser.fusions.cublaslt import put_weight_gradient
from te_fuser.kernels.cublaslt import products
from tests.fusions.products import library_on_the_cpu


@pytest.mark.parametrize("over", [True, False])
def test_its_body_adds_or_writes_over(over: bool) -> None:
    weight = torch.nn.Parameter(torch.zeros(5, 6))
    weight.main_grad = torch.ones(5, 6)
    weight.overwrite_main_grad = over
    weight.grad_added_to_main_grad = False
    dy, x = torch.ones(3, 5), torch.ones(3, 6)
    with mock.patch.object(products, "put_weight_gradient") as put:
        given = put_weight_gradient(dy, x, weight)
    (got_dy, got_x, held), options = put.call_args
    assert got_dy is dy and got_x is x and held.data_ptr() == weight.main_grad.data_ptr()
    assert options == {"add": not over}
    assert weight.grad_added_to_main_grad and given.shape == weight.shape and not given.any()


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
    weight.overwrite_main_grad = over
    with library_on_the_cpu() as fake:
        for times in (1, 2):
            Product.apply(Product.apply(x, weight), weight).sum().backward()
            torch.testing.assert_close(weight.main_grad, dw if over else 1 + times * dw, rtol=1e-4, atol=1e-4)
        assert fake.products == 4

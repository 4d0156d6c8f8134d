"""Backward of a MatMul whose weight's gradient goes to `main_grad`: added by the product itself, in cuBLASLt."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from te_fuser.fusions.cublaslt import body_of, cost_of, why_no_product
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Body, Match
from te_fuser.kernels.cublaslt import products
from te_fuser.ops.base import Gradient
from te_fuser.ops.matmul import MatMul
from te_fuser.params.main_grad import put_gradient


def put_weight_gradient(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, over: bool = False) -> torch.Tensor:
    """main_grad += dy^T x, or main_grad = dy^T x; gives what stands for it."""

    def put(dy: torch.Tensor, x: torch.Tensor, main_grad: torch.Tensor, over: bool) -> None:
        products.put_weight_gradient(dy, x, main_grad, add=not over)

    return put_gradient(dy, x, weight, over, put)


_put_over = functools.partial(put_weight_gradient, over=True)


def _choose(m: Match, method: str) -> Body | Callable[..., torch.Tensor]:
    if method == "input_gradient":
        return body_of(m, "dgrad")
    return _put_over if m[0].overwrite_main_grad else put_weight_gradient


@fusion(
    backward=[MatMul],
    details=Details(
        gradients=(
            Gradient(("input",), ("0.weight",), "input_gradient"),
            Gradient(("0.weight",), ("input", "0.weight"), "weight_gradient", by_attributes=("0.weight",)),
        ),
        choose=_choose,
    ),
    when=lambda m: (
        why_no_product(m, "dgrad") or why_no_product(m, "wgrad_onto") or True
        if m[0].accumulate_into_main_grad
        else "accumulate_into_main_grad is off"
    ),
    cost=lambda m: (cost_of(m, "dgrad"), cost_of(m, "wgrad_onto")),
)
class matmul_main_grad:
    """dx = dy W; main_grad += dy^T x, or main_grad = dy^T x, in the dtype of main_grad."""

    weight_gradient = staticmethod(put_weight_gradient)

    @staticmethod
    def input_gradient(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """dx = dy W."""
        return products.multiply("dgrad", dy, weight)

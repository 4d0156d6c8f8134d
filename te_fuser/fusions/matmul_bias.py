"""MatMul + Bias as one library call: the epilogue adds the bias, y = x W^T + b, or sums up its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from te_fuser.fusions.match import Match
from te_fuser.fusions.matmul import cost_of, native, why_no_product
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul, as_rows, in_shape_of
from te_fuser.ops.products import linear


def why_no_bias(m: Match, at: int = 1) -> str | None:
    """Why the bias of op `at` is none for an epilogue, which takes it in the dtype of the product; None if it is."""
    dtype = m[at].dtype_of("bias")
    return None if dtype == m.dtype else f"the bias is in {dtype}, the product in {m.dtype}"


def _pytorchs(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    # Under autocast the weight comes cast; the epilogue takes a bias of its dtype.
    return in_shape_of(x, linear(as_rows(x), weight, bias if bias.dtype == x.dtype else bias.to(x.dtype)))


def _library(m: Match, method: str) -> Callable[..., Any]:
    """cuBLASLt where it can do it, else the one of PyTorch's libraries that is the faster at hand."""
    suits = why_no_product(m, "forward_bias") is None and why_no_bias(m) is None
    return native(m, "forward_bias") if suits else _pytorchs


@fusion(
    forward=[MatMul, Bias],
    when=lambda m: m[0].weight.dtype == m[1].bias.dtype or "weight and bias differ in dtype",
    takes=("input", "0.weight", "1.bias"),
    choose=_library,
)
def matmul_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The product's epilogue adds the bias; gives its output, not the product before the bias."""
    return _pytorchs(x, weight, bias)


@fusion(
    backward=[MatMul, Bias],
    gradients=(
        Gradient(("input",), ("0.weight",), "input_gradient"),
        Gradient(("0.weight", "1.bias"), ("input",), "parameter_gradients"),
    ),
    when=lambda m: why_no_bias(m) or why_no_product(m, "dgrad") or why_no_product(m, "wgrad_sum") or True,
    cost=lambda m: (cost_of(m, "dgrad"), cost_of(m, "wgrad_sum")),
    choose=lambda m, method: native(m, {"input_gradient": "dgrad", "parameter_gradients": "wgrad_sum"}[method]),
)
class matmul_bias_backward:
    """dx = dy W; dW = dy^T x with an epilogue that sums dy over its rows for the bias."""

    input_gradient = staticmethod(products.input_gradient)
    parameter_gradients = staticmethod(products.weight_and_bias_gradient)

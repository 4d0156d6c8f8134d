"""MatMul alone by cuBLASLt, in both directions: y = x W^T, dx = dy W, dW = dy^T x."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from te_fuser.fusions.match import Cost, Match
from te_fuser.fusions.registry import fusion
from te_fuser.kernels import matmul as products
from te_fuser.ops.base import Gradient
from te_fuser.ops.matmul import MatMul


def why_no_product(m: Match, kind: str, at: int = 0) -> str | None:
    """Why MatMul number `at` of a match cannot be cuBLASLt's product of that kind; None when it can."""
    if m.device.type != "cuda":
        return f"cuBLASLt runs on cuda, the input is on {m.device.type}"
    if m.dtype not in products.DTYPES:
        return f"cuBLASLt's products are in bfloat16, float16 and float32, and this one is in {_name(m.dtype)}"
    if m.kernels == "torch":
        return "this plan is one of PyTorch's operations alone"
    if kind.startswith("wgrad") and (kind == "wgrad_onto") != m[at].op.accumulate_into_main_grad:
        return "the weight's gradient goes to its main_grad"
    if m[at].dtype_of("weight") != m.dtype:
        return f"input and weight differ in dtype, {_name(m.dtype)} and {_name(m[at].dtype_of('weight'))}"
    if m.capability is not None:  # a GPU that is not at hand cannot be asked
        return None
    return products.refusal(kind, m.dtype, *_sizes(m, kind, at), m.device)


def why_no_backward(m: Match) -> str | None:
    """Why a product that gives nothing but what follows its activation is none for a match; None if it is."""
    return "backward reads the value before the activation, and it gives only its output" if m.needs_grad else None


def _sizes(m: Match, kind: str, at: int) -> tuple[int, int, int]:
    """Rows, columns, and what is summed over."""
    op = cast(MatMul, m[at].op)
    return products.product_sizes(kind, m.x.rows, op.in_features, op.out_features)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# Kind of product -> the share of a plain product's rate that it reaches, with what else it saves or costs counted in.
# Measured on an H200 by exchanging one fusion at a time in a GPT layer (hidden 4096, ffn 16384, 8192 tokens, bfloat16),
# sustained, in alternating rounds: the card is then at its power limit, and what an epilogue takes alone says little.
# A layer of 16.4 ms, and what it gained by the epilogue instead of a generated kernel: GELU with the value before it
# 0.02 to 0.05 ms, both additions 0.04 ms, the slope of GELU -0.04 ms.
_EFFICIENCY = {
    "forward_bias": 0.99,
    "forward_bias_add": 0.985,
    "forward_add": 0.985,
    "forward_bias_relu": 0.985,
    "forward_bias_gelu": 0.96,
    "forward_bias_gelu_aux": 0.935,
    "dgrad_dgelu": 0.88,
    "dgrad_dgelu_sum": 0.68,  # of the library alone, not in a layer: 2.31 ms where the product took 1.57
    # ReLU's mask with the product that reads it: an MLP of the same sizes took 10.05 ms with the epilogue that gives
    # ReLU's output and a generated kernel for the slope, and 0.46 ms more by the mask, with the sum or without. So for
    # large products only tune() takes them.
    "forward_bias_relu_mask": 0.935,
    "dgrad_drelu": 0.68,
    "dgrad_drelu_sum": 0.68,
}

# cuBLASLt adds up dy in a kernel of its own after the product, at half a copy's speed: 201 MB took 93 us on an H200.
_SUM_PASSES = 2.0

# Launches: what was never measured in small sizes is priced so that only tune() takes it there. The library's kernel
# for sums of dy is none: its call took 15.2 us of the host, one without sums 10.4 and a generated kernel's 10.
_LAUNCHES = {"dgrad_dgelu_sum": 10, "dgrad_drelu": 10, "dgrad_drelu_sum": 10}


def cost_of(m: Match, kind: str, at: int = 0) -> Cost:
    """What MatMul number `at` of a match takes as cuBLASLt's product of that kind."""
    rows, columns, inner = _sizes(m, kind, at)
    options, size = products.KINDS[kind], m.dtype.itemsize
    epilogue, out = str(options.get("epilogue", "none")), rows * columns * size
    aux = rows * products.mask_bytes(columns) if "relu" in epilogue else out
    read = inner * (rows + columns) * size + (out if "add" in options else 0) + (aux if epilogue[0] == "d" else 0)
    written = out + (aux if "aux" in epilogue else 0)
    summed = _SUM_PASSES * inner * rows * size if kind == "wgrad_sum" else 0
    flops, share = 2.0 * rows * columns * inner, _EFFICIENCY.get(kind, 1.0)
    return Cost(read + summed, written, flops, _LAUNCHES.get(kind, 1), efficiency=share, apart=summed)


def native(m: Match, kind: str) -> Callable[..., Any]:
    """The product of that kind in the match's dtype, as a function of the tensors it reads."""
    return products.configured(kind, m.dtype, m.dtype).make


@fusion(
    forward=[MatMul],
    takes=("input", "0.weight"),
    when=lambda m: why_no_product(m, "forward") or True,
    cost=lambda m: cost_of(m, "forward"),
    choose=lambda m, method: native(m, "forward"),
)
def matmul(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """y = x W^T by cuBLASLt."""
    return products.linear(x, weight)


@fusion(
    backward=[MatMul],
    gradients=(
        Gradient(("input",), ("0.weight",), "input_gradient"),
        Gradient(("0.weight",), ("input",), "weight_gradient"),
    ),
    when=lambda m: why_no_product(m, "dgrad") or why_no_product(m, "wgrad") or True,
    cost=lambda m: (cost_of(m, "dgrad"), cost_of(m, "wgrad")),
    choose=lambda m, method: native(m, {"input_gradient": "dgrad", "weight_gradient": "wgrad"}[method]),
)
class matmul_backward:
    """dx = dy W and dW = dy^T x by cuBLASLt, each on its own."""

    input_gradient = staticmethod(products.input_gradient)
    weight_gradient = staticmethod(products.weight_gradient)

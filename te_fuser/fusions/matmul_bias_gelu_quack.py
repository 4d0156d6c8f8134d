"""MatMul + Bias + GELU by quack-kernels, where that is installed: y = gelu(x W^T + b), in the tanh form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch

from te_fuser.fusions.cublaslt import cost_of, why_no_backward, why_no_bias, why_no_gelu
from te_fuser.fusions.declaration import Details, fusion
from te_fuser.fusions.match import Cost, Match
from te_fuser.kernels.packages import quack_matmul as products
from te_fuser.ops.activations import GELU
from te_fuser.ops.bias import Bias
from te_fuser.ops.matmul import MatMul

# Small products are left to others: a step counts as so many of PyTorch's calls. It takes the host some 5, but by that
# price plans took it in MLPs of 256 to 2048 tokens, where these then took 1.15 to 1.49 of their time (an H200, by hand,
# commit 66f2500).
CALLS = 33.0


def why_no_quack(m: Match, product: int, gelu: int, bias: int) -> str | None:
    """Why ops `product`, `gelu` and `bias` of a match are none for quack's kernels; None if they are."""
    why = why_no_quack_product(m, product, "its tanh is right to 11 bits, which is enough for bfloat16 alone")
    return why or why_no_gelu(m, gelu) or why_no_bias(m, bias) or why_not_here(m, products.unusable)


def why_no_quack_product(m: Match, product: int, bfloat16_alone: str) -> str | None:
    """Why op `product` of a match, whatever its epilogue, is none for quack's kernels; None if it is.

    Args:
        bfloat16_alone: why the epilogue is for no other dtype.
    """
    if m.device.type != "cuda":
        return f"quack's kernels run on cuda, the input is on {m.device.type}"
    if m.target == "torch":
        return "this plan is one of PyTorch's operations alone"
    if m.dtype != torch.bfloat16:
        return f"{bfloat16_alone}, and this is {m.dtype}"
    op = cast(MatMul, m[product])
    if any(not n or n % products.MULTIPLE for n in (op.in_features, op.out_features)):
        return (
            f"it reads and writes rows of a multiple of {products.MULTIPLE}, and the product is of "
            f"{op.in_features} to {op.out_features} features"
        )
    if m[product].dtype_of("weight") != m.dtype:
        return f"input and weight differ in dtype, {m.dtype} and {m[product].dtype_of('weight')}"
    return None


def why_not_here(m: Match, unusable: Callable[[], str | None]) -> str | None:
    """Why the GPU or the package is none for it; `unusable` says why what is called of the package is not."""
    if m.capability is None and not torch.cuda.is_available():
        return "no GPU is at hand"
    major, minor = m.capability or torch.cuda.get_device_capability(m.device)
    if major != 9:
        return f"it was measured on compute capability 9 alone, this GPU has {major}.{minor}"
    return products.PACKAGE.missing() or (unusable() if torch.cuda.is_available() else None)


def cost_of_product(m: Match, kind: str, share: float, at: int = 0) -> Cost:
    """What a product takes that moves what cuBLASLt's of that kind moves, at a share of a plain product's rate."""
    return replace(cost_of(m, kind, at), efficiency=share, calls=CALLS)


# Beside plain products in a loop of an MLP's six (8192 rows, 4096 and 16384 features, bfloat16, on an H200 at its power
# limit) the loop took 9.981 ms with this one in the place of a plain product, 10.032 without.
_SHARE = 1.03


@fusion(
    forward=[MatMul, Bias, GELU],
    details=Details(takes=("input", "0.weight", "1.bias")),
    when=lambda m: why_no_backward(m) or why_no_quack(m, 0, 2, 1) or True,
    cost=lambda m: cost_of_product(m, "forward_bias_gelu", _SHARE),
)
def matmul_bias_gelu_quack(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Gives the output alone."""
    return products.linear_bias_gelu(x, weight, bias)


@fusion(
    forward=[MatMul, Bias, GELU],
    details=Details(takes=("input", "0.weight", "1.bias"), gives=("output", "1.output")),
    emits=("1.output",),
    when=lambda m: why_no_quack(m, 0, 2, 1) or True,
    cost=lambda m: cost_of_product(m, "forward_bias_gelu_aux", _SHARE),
)
def matmul_bias_gelu_quack_aux(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gives the value before GELU too, which backward reads."""
    return products.linear_bias_gelu_aux(x, weight, bias)

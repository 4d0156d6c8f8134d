"""Functions of PyTorch's that ops amount to, by class, for small calls: see `TorchFunction`."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch.nn import functional

from te_fuser.ops import GELU, Add, Bias, Cast, LayerNorm, MatMul, ReLU, Reshape, SiLU
from te_fuser.ops.base import Spec
from te_fuser.ops.products import is_torchs
from te_fuser.ops.tensor_function import TORCH_FUNCTIONS, TorchFunction


def linear(op: MatMul, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
    """F.linear, where it takes the library that te_fuser's products take."""
    if not is_torchs(x.rows, op.in_features, op.out_features, x.dtype, x.device):
        return None
    reads, keeps = ("input", "weight"), {"input": ("weight",), "weight": ("input",)}
    return TorchFunction("F.linear", functional.linear, reads, keeps, at_once=False, takes_addend=True)


def layer_norm(op: LayerNorm, x: Spec, names: tuple[str, ...]) -> TorchFunction | None:
    """F.layer_norm, unless it errs: over few features, and in half precision on a CPU."""
    coarse = op.features < 8 or (x.device.type == "cpu" and x.dtype.itemsize < 4)
    if op.zero_centered_gamma or coarse:
        return None
    sizes, eps, there = (op.features,), op.eps, [name for name in ("weight", "bias") if name in names]

    def normed(x: torch.Tensor, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None) -> Any:
        return functional.layer_norm(x, sizes, weight, bias, eps)

    keeps = {"input": ("input", *there[:1]), "weight": ("input",)}
    return TorchFunction("F.layer_norm", normed, ("input", *there), keeps, statistics=2)


def gelu(op: GELU, x: Spec, names: tuple[str, ...]) -> TorchFunction:
    """F.gelu in the op's form."""
    function = functools.partial(functional.gelu, approximate=op.approximate)
    return TorchFunction("F.gelu", function, keeps={"input": ("input",)})


TORCH_FUNCTIONS.add(TorchFunction("torch.add", torch.add, ("input", "bias"), addend="bias", at_once=False), Bias)
TORCH_FUNCTIONS.add(TorchFunction("torch.add", torch.add, ("input", "other")), Add)
TORCH_FUNCTIONS.add(TorchFunction("F.relu", functional.relu, keeps={"input": ("output",)}), ReLU)
TORCH_FUNCTIONS.add(TorchFunction("F.silu", functional.silu, keeps={"input": ("input",)}), SiLU)
TORCH_FUNCTIONS.add(gelu, GELU)
TORCH_FUNCTIONS.add(linear, MatMul)
TORCH_FUNCTIONS.add(layer_norm, LayerNorm)
TORCH_FUNCTIONS.add(lambda op, x, names: TorchFunction("Tensor.to", operator.methodcaller("to", op.dtype)), Cast)
TORCH_FUNCTIONS.add(
    lambda op, x, names: TorchFunction("Tensor.reshape", operator.methodcaller("reshape", op.shape)), Reshape
)

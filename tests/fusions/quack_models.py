"""What the tests of quack's fusions share: the package as if installed, the MLP that it was measured in, refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions
from te_fuser.fusions.matmul import why_no_backward
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels import matmul, quack_matmul
from te_fuser.ops import GELU, LayerNorm, Linear, RMSNorm, SwiGLU
from te_fuser.ops.base import FusableOperation
from tests.fusions.products import free
from tests.kernels import fake_quack
from tests.twins import sequential, tensor

ALONE, AUX, BACKWARD = "matmul_bias_gelu_quack", "matmul_bias_gelu_quack_aux", "bias_gelu_matmul_quack"
GATED = "swiglu_matmul_quack"

ROWS = ((7,), (3, 5), (1,), (2, 0))

_INACCURATE = "its tanh is right to 11 bits, which is enough for bfloat16 alone, and this is torch."
# (how the plan differs, GELU, why it is none for quack's kernels)
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"device": None, "rows": 8}, "tanh", "quack's kernels run on cuda, the input is on cpu"),
    ({"kernels": "reference"}, "tanh", "this plan is one of PyTorch's operations alone"),
    ({"dtype": torch.float16}, "tanh", f"{_INACCURATE}float16"),
    ({"dtype": torch.float32}, "tanh", f"{_INACCURATE}float32"),
    ({}, "none", "the epilogue's GELU is the tanh form, and this one is exact (erf)"),
    ({"device": "a100"}, "tanh", "it was measured on compute capability 9 alone, this GPU has 8.0"),
    ({"device": "b200"}, "tanh", "it was measured on compute capability 9 alone, this GPU has 10.0"),
]


def install(patch: pytest.MonkeyPatch, version: str | None = fake_quack.VERSION) -> None:
    """The package as if it were there, for plans of a GPU that is not."""
    patch.setattr(quack_matmul, "installed_version", lambda: version)
    patch.setattr(quack_matmul, "unusable", lambda: None)


def mlp(**last: Any) -> tuple[FusableOperation, ...]:
    """LayerNorm, 4096 -> 16384, GELU, -> 4096, without memory; the last product is given what is named."""
    with torch.device("meta"):
        return LayerNorm(4096), Linear(4096, 16384), GELU("tanh"), Linear(16384, 4096, **last)


def gated_mlp(**last: Any) -> tuple[FusableOperation, ...]:
    """RMSNorm, 4096 -> 2 x 14336, SwiGLU, -> 4096, no biases, no memory; the last product is given what is named."""
    with torch.device("meta"):
        up, down = Linear(4096, 2 * 14336, bias=False), Linear(14336, 4096, bias=False, **last)
        return RMSNorm(4096), up, SwiGLU(), down


def names(steps: tuple[Any, ...]) -> list[str]:
    """Of quack's steps."""
    return [step.name for step in steps if step.name in (ALONE, AUX, BACKWARD, GATED)]


def on_the_cpu(patch: pytest.MonkeyPatch) -> tuple[fake_quack.Package, tuple[Fusion, ...]]:
    """A package that computes, and its fusions at no cost with what they need of a GPU left out."""
    package = fake_quack.in_place(patch)
    patch.setattr(matmul, "weight_gradient", _weight_gradient)
    patch.setattr(matmul, "put_weight_gradient", _put_weight_gradient)
    found = {name: free(fusions.get(name)) for name in (ALONE, AUX, BACKWARD, GATED)}
    unasked = {name: dataclasses.replace(fusion, when=None) for name, fusion in found.items()}
    unasked[ALONE] = dataclasses.replace(found[ALONE], when=lambda m: why_no_backward(m) or True)
    return package, tuple(unasked.values())


def _weight_gradient(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return dy.reshape(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def _put_weight_gradient(dy: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, add: bool = True) -> None:
    made = _weight_gradient(dy, x)
    onto.add_(made) if add else onto.copy_(made)


def small_mlps(**options: Any) -> Iterator[tuple[Sequential, torch.Tensor]]:
    """MLPs in float64 and their inputs, of several leading dimensions, one row and none."""
    for rows in ROWS:
        model = sequential(LayerNorm(16), Linear(16, 24), GELU("tanh"), Linear(24, 8), **options)
        yield model, tensor(*rows, 16)


def small_gated_mlps(**options: Any) -> Iterator[tuple[Sequential, torch.Tensor]]:
    """The same with SwiGLU."""
    for rows in ROWS:
        model = sequential(RMSNorm(16), Linear(16, 48, bias=False), SwiGLU(), Linear(24, 8, bias=False), **options)
        yield model, tensor(*rows, 16)

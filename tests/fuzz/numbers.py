"""Inputs that are no plain numbers, and what must then be as in PyTorch: where results are NaN, infinite or finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from te_fuser import ops
from te_fuser.compare import Evaluate, Row, Tensors, doubled, neighbour
from te_fuser.formula import absolute, maximum, minimum, relu, where

_NEIGHBOURS = 4
_EXTREME = torch.tensor((math.nan, math.inf, -math.inf, 0.0, -0.0, 6e4, -6e4, 1e-7), dtype=torch.float64)


def _extreme(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """One number in eight is NaN, infinite, zero or of an extreme size."""
    picked = _EXTREME[torch.randint(len(_EXTREME), x.shape, generator=rng)]
    return torch.where(torch.rand(x.shape, generator=rng) < 0.125, picked, x)


def _ties(x: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """Few different numbers, so that many are equal, and many zero."""
    return (x * 2.0).round() / 2.0


# Name of a kind of input -> it from random numbers.
NUMBERS: dict[str, Callable[[torch.Tensor, torch.Generator], torch.Tensor]] = {
    "plain": lambda x, rng: x,
    "ties": _ties,
    "extreme": _extreme,
}


class Enlarged(ops.RowOp):
    """y = x * 1e20 * 1e20 * 1e-30, in this order."""

    def compute(self, x: Any) -> Any:
        return x * 1e20 * 1e20 * 1e-30


class Tied(ops.RowOp):
    """Ties with numbers and with itself, and multiples of what may be no number."""

    def compute(self, x: Any) -> Any:
        kinked = maximum(x, 0.5) + minimum(x, -x) + relu(x) * absolute(x) + x * 0.0
        return where(x > 1.0, x * 1e-25 * 1e-25, kinked) + (x - x)


EXTREME_OPS = ("Enlarged()", "Tied()", "ops.Scale(value=0.0)", "ops.Scale(value=1e20)", "ops.Scale(value=1e-30)")


def judge_kinds(case: str, found: Tensors, data: Tensors, evaluate: Evaluate, **_: Any) -> list[Row]:
    """One row for each result of a fused run that is NaN, infinite or finite where PyTorch's is not.

    What overflows or cancels in float64 otherwise, or on data that differ by an ulp, is nobody's promise.
    """
    plain = evaluate(data, False)
    others = [evaluate(doubled(data), True), *(evaluate(neighbour(data, k, 0.0), False) for k in range(_NEIGHBOURS))]
    rows = []
    for name, tensor in found.items():
        wanted = _kinds(plain[name])
        wrong = _kinds(tensor) != wanted
        for other in others:
            wrong &= _kinds(other[name]) == wanted
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            note = f"is {tensor[place].item()} at {place}, where PyTorch has {plain[name][place].item()}"
            rows.append(Row(case, name, note=note))
    return rows


def _kinds(t: torch.Tensor) -> torch.Tensor:
    """0 for a finite number, 1 and -1 for the infinities, 2 for NaN."""
    return torch.where(t.isnan(), 2.0, t.sign().double() * t.isinf())

"""Fusions of each direction, and what a small model's plan makes of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import ops
from te_fuser.fusions import Cost, Details, Fusion, fusion
from tests.twins import sequential, tensor

X = tensor(6, 8)
_DETAILS = {field.name for field in dataclasses.fields(Details)}
FREE = {"cost": lambda m: Cost(seconds=0.0)}  # so that a fusion wins wherever it fits


def declared(**options: Any) -> Callable[[Any], Fusion]:
    """fusion(...) of these options, those of its details among them."""
    details = {name: options.pop(name) for name in _DETAILS & options.keys()}
    return fusion(**options, details=Details(**details))


def mlp(**options):
    return sequential(ops.LayerNorm(8), ops.Linear(8, 16), ops.GELU("none"), ops.Linear(16, 8), **options)


def steps(model, direction, x=X, **arguments):
    return [s.name for s in getattr(model.plan(x, **arguments), direction)]


def reasons(model, name, x=X, **arguments):
    return [r.reason for r in model.plan(x, **arguments).refusals if r.name == name]


def declare_forward(**options):
    @declared(forward=[ops.MatMul, ops.Bias, ops.GELU], emits=["1.output"], name="mine", **{**FREE, **options})
    def linear_gelu(m, x):
        """Two ops and an activation in one call."""
        before = F.linear(x, m[0].weight, m[1].bias)
        m.emit("1.output", before)
        return F.gelu(before, approximate=m[2].approximate)

    return linear_gelu


def declare_backward(**options):
    @te_fuser.fusion(
        backward=[ops.MatMul, ops.Bias, ops.GELU],
        reads=["input", "0.weight", "1.output"],
        name="mine",
        **{**FREE, **options},
    )
    def linear_gelu_backward(m, dy):
        before = m["1.output"].detach().requires_grad_()
        with torch.enable_grad():
            d = torch.autograd.grad(F.gelu(before, approximate=m[2].approximate), before, dy)[0]
        made = {}
        if m.needs("0.weight"):
            made["0.weight"] = d.t() @ m["input"]
        if m.needs("1.bias"):
            made["1.bias"] = d.sum(0)
        return (d @ m["0.weight"] if m.needs("input") else None), made

    return linear_gelu_backward


def declare_joint(**options):
    @te_fuser.fusion(joint=[ops.Bias, ops.GELU], saves=["slope"], name="mine", **{**FREE, **options})
    class BiasGelu:
        """Keeps the slope, and nothing else, for its own backward."""

        @staticmethod
        def forward(m, x):
            before = (x + m[0].bias).detach().requires_grad_()
            with torch.enable_grad():
                y = F.gelu(before, approximate=m[1].approximate)
                m.emit("slope", torch.autograd.grad(y.sum(), before)[0])
            return y.detach()

        @staticmethod
        def backward(m, dy):
            d = dy * m["slope"]
            return d, {"0.bias": d.sum(0)}

    return BiasGelu

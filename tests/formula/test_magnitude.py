"""Bounds of an expression's size, in cheaper terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fuser.formula import erf, exp, expr, sigmoid, sin, tanh
from te_fuser.formula.evaluate import Interpreter
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.magnitude import Slope, bound_of, slope_of
from te_fuser.ops.activations import GELU_FORMS

X, Z = (expr.leaf(name, Axes.FULL, 8) for name in "xz")
Formula = Callable[[Any, Any], Any]
KNOWN: dict[str, tuple[Formula, Formula]] = {
    "gelu": (lambda x, z: GELU_FORMS["tanh"](x), lambda x, z: x),
    "gelu by erf": (lambda x, z: GELU_FORMS["none"](x), lambda x, z: x),
    "silu": (lambda x, z: x * sigmoid(x), lambda x, z: x),
    "swiglu": (lambda x, z: x * sigmoid(x) * z, lambda x, z: x * z),
    "geglu": (lambda x, z: z * GELU_FORMS["tanh"](x), lambda x, z: z * x),
    "half": (lambda x, z: 0.5 * tanh(x) * z * x, lambda x, z: 0.5 * x * z),
}
UNKNOWN: dict[str, Expr] = {
    "nothing is spared": 2.0 * X,
    "no function that has a bound": X * exp(X),
    "NaN where an argument is infinite": X * sin(X),
    "a leaf that the bound has not": X * sigmoid(Z),
    "a difference of infinities": X * sigmoid(X * X - X),
    "terms of two signs": X * tanh(X * X + X),
    "infinity times zero": X * Z * tanh(X * Z),
    "a sum": X * sigmoid(X) + Z,
    "more than two leaves": X * Z * X * sigmoid(X),
    "a bound without leaves": sigmoid(X),
    "a factor that no other joins": X * erf(1e30 * X),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known(name: str) -> None:
    formula, bound = KNOWN[name]
    assert bound_of(formula(X, Z)) is bound(X, Z)
    x, z = torch.randn(2, 10_000, dtype=torch.float64) * torch.tensor([[0.01], [30.0]], dtype=torch.float64)
    for a, b in ((x, z), (z, x), (100 * x, z)):
        assert bool((formula(a, b).abs() <= bound(a, b).abs()).all())


SLOPES: dict[str, tuple[Expr, float]] = {
    "gelu": (GELU_FORMS["tanh"](X), 0.5),
    "gelu by erf": (GELU_FORMS["none"](X), 0.5),
    "silu": (X * sigmoid(X), 0.5),
    "three": (3.0 * X * (1.5 + tanh(2.0 * X)) * sigmoid(X), 2.25),
}
NO_SLOPES: dict[str, Expr] = {
    "two leaves": X * sigmoid(X) * Z,
    "another leaf": X * sigmoid(Z),
    "below zero": X * tanh(X),
    "falls": X * sigmoid(-1.0 * X),
    "even": X * sigmoid(X * X),
    "a difference": X * (1.0 - sigmoid(X)),
    "no function of it": 2.0 * X * X,
    "nothing behind it": X,
}


@pytest.mark.parametrize("name", SLOPES)
def test_slopes(name: str) -> None:
    """Of numbers that lie between two, none is larger than what the two say together."""
    e, at_zero = SLOPES[name]
    assert slope_of(e) == Slope(X, pytest.approx(at_zero))
    x = torch.linspace(-9.0, 9.0, 1001, dtype=torch.float64)

    def of(x: torch.Tensor) -> torch.Tensor:
        return Interpreter({"x": x[:, None].expand(-1, 8)}, {}, len(x), x, (1, 1)).run([e])[0][:, 0].abs()

    values = of(x)
    for high in range(500, 1001, 50):
        for low in range(0, 501, 50):
            bound = max(values[high].item(), at_zero * -x[low].item())
            assert values[low : high + 1].max() <= bound * 1.0001


@pytest.mark.parametrize("name", NO_SLOPES)
def test_no_slopes(name: str) -> None:
    assert slope_of(NO_SLOPES[name]) is None


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name: str) -> None:
    assert bound_of(UNKNOWN[name]) is None

"""How large an expression can be, in cheaper terms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fuser.formula import erf, exp, expr, sigmoid, sin, tanh
from te_fuser.formula.expr import Axes, Expr
from te_fuser.formula.magnitude import bound_of
from te_fuser.ops.gelu import GELU_FORMS

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


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown(name: str) -> None:
    assert bound_of(UNKNOWN[name]) is None

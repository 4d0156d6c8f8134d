"""NaN, infinities, ties and numbers of extreme size: values and gradients are torch's, whatever is simplified."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.codegen import compiler
from te_fuser.formula import Axes, expr, maximum, minimum, relu, row_max, row_min
from te_fuser.formula.adjoint import differentiate
from te_fuser.formula.evaluate import Interpreter
from tests.codegen.corpus import KINKS

NAN, INF = math.nan, math.inf
NUMBERS = (NAN, INF, -INF, 0.0, -0.0, 1.0, -1.0, 0.5, 3e38, -3e38, 1e-38, 2.0)
FIRST = torch.tensor(NUMBERS).repeat_interleave(len(NUMBERS)).reshape(-1, len(NUMBERS))
SECOND = torch.tensor(NUMBERS).repeat(len(NUMBERS), 1)  # FIRST beside SECOND: every pair

PAIRS: dict[str, Callable[[Any, Any], Any]] = {
    **{name: lambda x, other, fn=fn: fn(x) for name, fn in KINKS.items()},  # type: ignore[misc]
    "beyond": lambda x, other: x * 1e40,
    "maximum": maximum,
    "minimum": minimum,
    "floor": lambda x, other: maximum(x, 0.0) + minimum(other, 1),
    "product": lambda x, other: (x * 1e20) * (other * 1e20),
    "quotient": lambda x, other: (x * 1e-25) / (other * 1e25),
    "row_max": lambda x, other: row_max(x) * other,
    "row_min": lambda x, other: row_min(x) * other,
    "lost": lambda x, other: 0.0 * x + other,
    "two branches": lambda x, other: (x - x) * 1e20 + relu(other) * 1e38,
}


@pytest.mark.parametrize("name", PAIRS)
def test_values_and_gradients_are_those_of_torch(name: str) -> None:
    given = {"x": FIRST.clone().requires_grad_(), "other": SECOND.clone().requires_grad_()}
    leaves = {n: expr.leaf(n, Axes.FULL, FIRST.shape[1]) for n in given}
    y, on_torch = PAIRS[name](*leaves.values()), PAIRS[name](*given.values())
    dy = torch.tensor((2.0, -0.5, INF, NAN)).repeat(3).expand_as(FIRST)
    seed = expr.leaf("dy", Axes.FULL, FIRST.shape[1])
    adjoints = differentiate({y: seed}, leaves.values())
    machine = Interpreter({**{n: t.detach() for n, t in given.items()}, "dy": dy}, {}, len(FIRST), FIRST)
    value, *gradients = machine.run([y, *adjoints.values()])
    wanted = torch.autograd.grad(on_torch, list(given.values()), dy, allow_unused=True)
    torch.testing.assert_close(value, on_torch.detach(), equal_nan=True)
    for leaf, found, want in zip(given, gradients, wanted, strict=True):
        if want is not None:
            text = f"gradient of {leaf}"
            torch.testing.assert_close(found, want, equal_nan=True, msg=lambda m, t=text: f"{t}: {m}")


MODELS: dict[str, tuple[Callable[[], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "ReLU": (ops.ReLU, torch.relu),
    "SReLU": (ops.SReLU, lambda x: torch.relu(x) * torch.relu(x)),
    "ReGLU": (ops.ReGLU, lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]),
    "Scale by nothing": (lambda: ops.Scale(value=0.0), lambda x: x * 0.0),
    "large scales": (lambda: Sequential(ops.Scale(value=1e20), ops.Scale(value=1e20)), lambda x: x * 1e20 * 1e20),
    "Dropout of all": (lambda: ops.Dropout(1.0), lambda x: x * 0.0),
}


@pytest.mark.parametrize("kernels", ["reference", "auto"])
@pytest.mark.parametrize("name", MODELS)
def test_models_hand_on_what_is_no_number(name: str, kernels: str) -> None:
    """With one bias before, so that there is a kernel with a sum over rows, and one after."""
    if kernels == "auto" and compiler.find_compiler() is None:
        pytest.skip("needs a C++ compiler")
    made, on_torch = MODELS[name]
    model = Sequential(ops.Bias(12), made(), kernels=kernels)
    with torch.no_grad():
        model[0].bias.zero_()
    x, plain = (FIRST.clone().requires_grad_() for _ in range(2))
    bias = torch.zeros(12, requires_grad=True)
    y, want = model(x), on_torch(plain + bias)
    dy = torch.linspace(-1.0, 2.0, want.numel()).reshape(want.shape)
    y.backward(dy)
    want.backward(dy)
    for found, meant in ((y, want), (x.grad, plain.grad), (model[0].bias.grad, bias.grad)):
        torch.testing.assert_close(found, meant, equal_nan=True)


@pytest.mark.skipif(compiler.find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("large", [INF, -INF, 3e38])
def test_sums_over_rows_are_infinite_where_their_terms_are(large: float) -> None:
    """What compensated sums have lost is then no number, and must not come back."""
    model = Sequential(ops.Scale(()), ops.Bias(5))
    x = torch.ones(300, 5)
    x[[3, 7, 200], 1] = large
    model(x).backward(x)
    assert torch.equal(model[1].bias.grad, torch.tensor([300.0, large if math.isinf(large) else INF, 300, 300, 300]))
    assert model[0].weight.grad == INF

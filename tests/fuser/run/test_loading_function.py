"""Plans that come to one function: a call that is like the last one runs that, and nothing around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from te_fuser import Sequential, fusions, ops
from te_fuser.fusions.cublaslt import linear_bias

WIDTH = 16
X = torch.randn(3, WIDTH)


def function_of(model: Sequential, x: torch.Tensor, **inputs: Any) -> Callable[..., torch.Tensor] | None:
    """What calls like these run by; the second call is known by the first."""
    first, again = model(x, **inputs), model(x, **inputs)
    torch.testing.assert_close(again, first)
    (part,) = model._prepared()
    known = part.fuser._last  # type: ignore[union-attr]
    assert known is not None
    return known.function


def linear(columns: int = WIDTH) -> Sequential:
    return Sequential(ops.Linear(WIDTH, columns))


@torch.no_grad()
def test_a_linear_without_gradients_is_pytorchs() -> None:
    model = linear()
    assert function_of(model, X) is F.linear
    assert torch.equal(model(X), F.linear(X, model[0].weight, model[0].bias))
    for shape in ((WIDTH,), (0, WIDTH), (2, 5, WIDTH)):
        x = torch.randn(shape)
        assert torch.equal(model(x), F.linear(x, model[0].weight, model[0].bias))


@torch.no_grad()
def test_a_choice_that_sizes_or_dtypes_leave_is_made_at_each_call() -> None:
    large = linear(2**17)
    assert function_of(large, X) is linear_bias  # maybe oneDNN's is faster
    torch.testing.assert_close(large(X), F.linear(X, large[0].weight, large[0].bias))
    assert function_of(linear().bfloat16(), X.bfloat16()) is linear_bias  # maybe in float32


@pytest.mark.parametrize(
    "make",
    [
        lambda: Sequential(ops.Linear(WIDTH, WIDTH), ops.Output("y"), ops.GELU()),
        lambda: Sequential(ops.LayerNorm(WIDTH)),  # a kernel
        lambda: Sequential(ops.Identity(), ops.Flatten(0)),  # another name of its input
    ],
)
def test_what_is_more_than_a_function_of_tensors_is_run_by_its_steps(make: Callable[[], Sequential]) -> None:
    model = make()
    with torch.no_grad(), fusions.disabled("torch_functions"):
        assert function_of(model, X) is None


def test_gradients_that_come_are_seen() -> None:
    model, x = linear(), X.clone()
    with torch.no_grad():
        model(x), model(x)
    y = model(x)
    y.sum().backward()
    want = torch.autograd.grad(F.linear(x, model[0].weight, model[0].bias).sum(), [*model.parameters()])
    for p, g in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, g)


def test_a_list_that_changed_is_seen_by_the_calls_that_are_known() -> None:
    """What a list is made of belongs to what its plan's calls are known by."""
    model, seen = linear(), list[torch.Tensor]()
    with torch.no_grad():
        model(X), model(X)
        hook = model[0].register_forward_hook(lambda _, __, y: seen.append(y))
        model(X)
        assert len(seen) == 1
        hook.remove()
        model.append(ops.Scale(WIDTH))
        model[1].weight.fill_(3.0)
        torch.testing.assert_close(model(X), 3.0 * F.linear(X, model[0].weight, model[0].bias))
        model(X)
        del model[0]
        torch.testing.assert_close(model(X), 3.0 * X)
        assert len(seen) == 1

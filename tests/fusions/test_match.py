"""What a fusion says of a match: the body that it chooses, as overwriting and explain() know it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Body, Cost, Details, Match, fusion
from te_fuser.ops.base import Gradient, Spec
from tests.fusions.products import plan
from tests.twins import assert_as_meant, sequential, tensor


def product(dy: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return dy @ other


def chosen(answer: Any) -> fusions.Fusion:
    """dx = dy W by what `answer` makes of that function; dW = dy^T x as it is declared."""

    @fusion(
        backward=[ops.MatMul],
        details=Details(
            gradients=[Gradient(("input",), ("0.weight",), "dx"), Gradient(("0.weight",), ("input",), "dw")],
            choose=lambda m, method: answer(product) if method == "dx" else None,
            registered=False,
        ),  # type: ignore[arg-type, return-value]
        cost=lambda m: Cost(seconds=1e-9),
    )
    class mine:
        @staticmethod
        def dw(dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return dy.reshape(-1, dy.shape[-1]).T @ x.reshape(-1, x.shape[-1])

    return mine


def described(function: Any) -> Body:
    return Body(function, describe=lambda: "long multiplication")


@pytest.mark.parametrize("answer", [lambda f: f, Body, described])
def test_what_is_chosen_runs_and_what_is_not_is_as_declared(answer: Any) -> None:
    model, x = sequential(ops.MatMul(8, 6)), tensor(5, 8)
    with fusions.only(chosen(answer)):
        assert [s.name for s in model.plan(x).backward] == ["mine", "mine"]
        assert_as_meant(model, x)


def overwritten(p: Plan) -> list[Any]:
    """What kernels of the backward may store their outputs over."""
    return [pair for s in p.backward for pair in getattr(getattr(s.task, "description", None), "overwrites", ())]


def test_only_of_a_plain_body_it_is_known_that_nobody_else_holds_what_it_made() -> None:
    parts = ops.MatMul(4096, 4096), ops.Dropout(0.1), ops.MatMul(4096, 4096)
    others = [name for name in fusions.names() if name != "matmul_backward"]
    for answer, number in ((lambda f: f, 0), (Body, 0), (lambda f: Body(f, plain=True), 1)):
        with fusions.only(chosen(answer), *others):
            assert len(overwritten(plan(*parts))) == number


def test_explain_says_what_a_body_runs_by() -> None:
    model, x = te_fuser.Sequential(ops.MatMul(8, 6), ops.MatMul(6, 8)), torch.randn(5, 8, requires_grad=True)
    with fusions.only(chosen(Body)):
        assert "algorithm" not in str(model.explain(x, details=True))
    with fusions.only(chosen(described)):
        assert str(model.explain(x, details=True)).count("algorithm: long multiplication") == 2


def test_row_ops_run_by_something_that_there_is() -> None:
    x = Spec((5, 8), torch.float32, torch.device("cpu"))
    match = Match((), x, x)
    assert match.target == "torch"
    with pytest.warns(DeprecationWarning, match="is called Match.target now"):
        assert match.kernels == "torch"

"""Backward fusions whose nodes run apart: what runs, what is chosen for a match, what must be needed together."""

from __future__ import annotations

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost
from te_fuser.ops.base import Gradient
from tests.fusions.declared import declared
from tests.fusions.products import covered, reasons
from tests.twins import assert_as_meant, sequential, tensor


class _Bodies:
    @staticmethod
    def dx(dy: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return dy @ weight

    @staticmethod
    def parameters(dy: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dy, x = (t.reshape(-1, t.shape[-1]) for t in (dy, x))
        return dy.T @ x, dy.sum(0)


def apart(**changes: object) -> fusions.Fusion:
    options = {
        "backward": [ops.MatMul, ops.Bias],
        "gradients": (
            Gradient(("input",), ("0.weight",), "dx"),
            Gradient(("0.weight", "1.bias"), ("input",), "parameters"),
        ),
        "cost": lambda m: (Cost(seconds=1e-9), Cost(seconds=2e-9)),
        "name": "apart",
        "registered": False,
    }
    return declared(**{**options, **changes})(_Bodies)


def test_nodes_run_apart_and_are_right() -> None:
    model, x = sequential(ops.SiLU(), ops.Linear(8, 6), ops.SiLU()), tensor(5, 8)
    with fusions.only(apart(), "stretch"):
        steps = [s for s in model.plan(x).backward if s.name == "apart"]
        assert [(s.seconds, s.chain) for s in steps] == [(1e-9, True), (2e-9, False)]
        assert_as_meant(model, x)
        te_fuser.verify(apart(), kernels="reference")


def test_nodes_are_chosen_for_a_match() -> None:
    asked = []

    def choose(m: fusions.Match, method: str) -> object:
        asked.append((len(m), method))
        return getattr(_Bodies, method)

    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    with fusions.only(apart(choose=choose)):
        assert_as_meant(model, x)
    assert set(asked) == {(2, "dx"), (2, "parameters")}


def test_what_is_made_together_must_be_needed_together() -> None:
    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    model[0].bias.requires_grad_(False)
    with fusions.only(apart()):
        why = "nobody needs the gradient of 1.bias, which it makes with 0.weight"
        assert reasons(model.plan(x), "apart") == {why}
    model[0].weight.requires_grad_(False)
    with fusions.only(apart()):
        assert covered(model.plan(x).backward)[0] == ("apart", 0, 2)
        (dx,) = torch.autograd.grad(model(x).sum(), x)
        assert torch.equal(dx, torch.ones(5, 6, dtype=x.dtype) @ model[0].weight)


def test_a_gradient_that_no_node_gives() -> None:
    model, x = sequential(ops.Linear(8, 6)), tensor(5, 8)
    entry = apart(gradients=(Gradient(("input",), ("0.weight",), "dx"),), cost=None)
    with fusions.only(entry):
        assert reasons(model.plan(x), "apart") == {"it gives no gradient of 0.weight, 1.bias"}


def test_declarations_that_mean_nothing() -> None:
    with pytest.raises(ValueError, match="a forward fusion has no gradients; that is for backward"):
        apart(backward=None, forward=[ops.MatMul])

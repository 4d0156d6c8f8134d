"""Backward fusions whose nodes run apart: what runs, what is chosen for a match, what must be needed together."""

from __future__ import annotations

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
        te_fuser.verify(apart(), kernels="reference", dtypes=[torch.float64])


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


class _Slope:
    """SiLU behind a product: its slope is made once, with dx, and read by the weight's gradient."""

    @staticmethod
    def dx(dy: torch.Tensor, h: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        s = torch.sigmoid(h)
        dh = dy * s * (1 + h * (1 - s))
        return dh @ weight, dh

    @staticmethod
    def dw(dh: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return dh.T @ x


SLOPE = {
    "backward": [ops.MatMul, ops.SiLU],
    "gradients": (
        Gradient(("input", "0.d_output"), ("0.output", "0.weight"), "dx"),
        Gradient(("0.weight",), ("0.d_output", "input"), "dw"),
    ),
    "cost": lambda m: (Cost(seconds=0.0), Cost(seconds=0.0)),
    "name": "slope",
    "registered": False,
}


def test_a_node_reads_the_gradient_of_a_value_inside_that_another_makes() -> None:
    entry = declared(**SLOPE)(_Slope)
    model, x = sequential(ops.SiLU(), ops.MatMul(8, 6), ops.SiLU(), verify=True), tensor(5, 8)
    with fusions.only(entry, "stretch"):
        first, second = (s for s in model.plan(x).backward if s.name == "slope")
        assert first.chain and not second.chain and first.writes()[1] == second.reads()[0]
        assert_as_meant(model, x)
        model[1].weight.requires_grad_(False)
        assert [s.name for s in model.plan(x).backward].count("slope") == 1
        torch.testing.assert_close(*(torch.autograd.grad(run(x).sum(), x)[0] for run in (model, model.reference)))


def test_a_gradient_inside_that_nobody_makes() -> None:
    """Without an input that needs its gradient nothing makes what the other node reads."""
    with fusions.only(declared(**SLOPE)(_Slope)):
        found = reasons(sequential(ops.MatMul(8, 6), ops.SiLU()).plan(tensor(5, 8, grad=False)), "slope")
    assert found == {"nobody needs the gradients that it makes 0.d_output with"}

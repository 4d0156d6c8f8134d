"""Fusions in force: in a scope, in a thread, in models that ran before; backward ones whose nodes run apart."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost
from te_fuser.ops.base import Gradient
from tests.fusions.products import covered, reasons
from tests.fusions.registered import FREE, X, declare_forward, declared, mlp, steps
from tests.twins import assert_as_meant, sequential, tensor


def test_disabled_is_scoped_and_reaches_models_that_ran():
    declare_forward()
    model = mlp()
    y = model(X)
    assert steps(model, "forward")[1] == "mine"
    with fusions.disabled("mine"):
        assert "mine" not in steps(model, "forward") and "matmul_bias" in steps(model, "forward")
        torch.testing.assert_close(assert_as_meant(model, X)[0], y.detach())
        with fusions.disabled("matmul_bias"):
            assert not {"mine", "matmul_bias"} & set(steps(model, "forward"))
        assert "matmul_bias" in steps(model, "forward")
    assert steps(model, "forward")[1] == "mine"
    with contextlib.suppress(ZeroDivisionError), fusions.disabled("mine"):
        raise ZeroDivisionError
    assert steps(model, "forward")[1] == "mine"


def test_only_and_without_a_fusion_that_need_not_be_registered():
    declare_forward()
    model = mlp()
    with fusions.only("mine"):
        assert steps(model, "forward") == ["layer_norm_fwd", "mine", "mat_mul", "bias_fwd"]
        assert_as_meant(model, X)
        with fusions.only("matmul_bias"):
            assert "mine" not in steps(model, "forward")
    with fusions.only():
        assert len(steps(model, "forward")) == len(model.plan(X).graph.nodes)
        assert_as_meant(model, X)
    fusions.unregister("mine")
    with fusions.only(declare_forward(registered=False)):
        assert "mine" in steps(model, "forward")
        assert_as_meant(model, X)
    assert "mine" not in steps(model, "forward")
    model = sequential(ops.GELU(), ops.Bias(8), ops.SiLU(), ops.Linear(8, 8))
    with fusions.disabled("stretch"):
        assert steps(model, "forward")[:3] == ["gelu_fwd", "bias_fwd", "silu_fwd"]
        assert_as_meant(model, X)


def test_scopes_are_of_one_thread():
    declare_forward()
    model, found = mlp(), {}
    inside, asked = threading.Event(), threading.Event()

    def other():
        inside.wait(10)
        found["other"] = "mine" in steps(model, "forward")
        asked.set()

    thread = threading.Thread(target=other)
    thread.start()
    with fusions.disabled("mine"):
        inside.set()
        assert asked.wait(10)
        assert "mine" not in steps(model, "forward")
    thread.join()
    assert found == {"other": True}


def test_registering_reaches_models_that_ran():
    model = mlp()
    assert_as_meant(model, X)
    entry = declare_forward()
    ran = []
    fusions.unregister(entry)

    @te_fuser.fusion(forward=[ops.GELU], name="late", **FREE)
    def late(m, x):
        ran.append(1)
        return F.gelu(x)

    model(X)
    assert ran == [1]
    fusions.unregister("late")
    model(X)
    assert ran == [1]


def test_an_op_alone_is_fused_too():
    @te_fuser.fusion(joint=[ops.SiLU], name="mine", saves=["s"], **FREE)
    class Silu:
        @staticmethod
        def forward(m, x):
            m.emit("s", torch.sigmoid(x))
            return x * torch.sigmoid(x)

        @staticmethod
        def backward(m, dy):
            return 7.0 * dy * m["s"]  # wrong, so that it shows

    op = ops.SiLU()
    y = op(X)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), X)[0], 7.0 * torch.sigmoid(X.detach()))


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


@pytest.mark.usefixtures("few_rows")
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
    # Without an input that needs its gradient nothing makes what the other node reads.
    with fusions.only(declared(**SLOPE)(_Slope)):
        found = reasons(sequential(ops.MatMul(8, 6), ops.SiLU()).plan(tensor(5, 8, grad=False)), "slope")
    assert found == {"nobody needs the gradients that it makes 0.d_output with"}

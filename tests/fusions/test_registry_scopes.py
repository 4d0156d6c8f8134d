"""Which fusions are in force: in a scope, in a thread, in models that ran before."""

from __future__ import annotations

import contextlib
import threading

import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from tests.fusions.registered import FREE, X, declare_forward, mlp, steps
from tests.twins import assert_as_meant, sequential


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


def test_only():
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


def test_only_takes_a_fusion_that_is_not_registered():
    entry = declare_forward(registered=False)
    model = mlp()
    with fusions.only(entry):
        assert "mine" in steps(model, "forward")
        assert_as_meant(model, X)
    assert "mine" not in steps(model, "forward")


def test_without_stretches_every_row_op_is_a_step():
    model = sequential(ops.GELU(), ops.Bias(8), ops.SiLU(), ops.Linear(8, 8))
    with fusions.disabled("stretch"):
        assert steps(model, "forward")[:3] == ["gelu_fwd", "bias_fwd", "silu_fwd"]
        assert_as_meant(model, X)


def test_a_scope_ends_with_an_error():
    declare_forward()
    model = mlp()
    with contextlib.suppress(ZeroDivisionError), fusions.disabled("mine"):
        raise ZeroDivisionError
    assert "mine" in steps(model, "forward")


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

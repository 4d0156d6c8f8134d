"""Joint fusions whose forward covers fewer ops than their backward."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fusions import Cost, Fusion, Optional, fusion
from te_fuser.fusions.match import FusionCall
from tests.twins import assert_as_meant, sequential, tensor


@pytest.fixture
def bias_silu() -> Iterator[Fusion]:
    @fusion(
        joint=[Optional(ops.Bias), ops.SiLU],
        name="bias_silu",
        cost=lambda m: Cost(seconds=1e-9),
        reads=("-1.input",),
        saves=("gate",),
        forward_ops=1,
    )
    class body:
        @staticmethod
        def forward(m: FusionCall, x: torch.Tensor) -> torch.Tensor:
            assert len(m) == 1
            gate = torch.sigmoid(x)
            m.emit("gate", gate)
            return x * gate

        @staticmethod
        def backward(m: FusionCall, dy: torch.Tensor) -> Any:
            x, gate = m["-1.input"], m["gate"]
            dx = dy * (gate + x * gate * (1 - gate))
            return dx, {"0.bias": dx.reshape(-1, dx.shape[-1]).sum(0)} if m.needs("0.bias") else {}

    yield body
    fusions.unregister(body)


def steps(model: te_fuser.Sequential, x: torch.Tensor, direction: str) -> dict[str, tuple[int, int]]:
    plan = model.plan(x)
    return {s.name: (s.start, s.stop) for s in (plan.forward if direction == "forward" else plan.backward)}


def test_the_ops_before_run_forward_as_they_are_planned(bias_silu: Fusion) -> None:
    model, x = sequential(ops.Linear(8, 6), ops.SiLU(), ops.MatMul(6, 3)), tensor(4, 5, 8)
    forward, backward = steps(model, x, "forward"), steps(model, x, "backward")
    assert forward["matmul_bias"] == (0, 2) and forward["bias_silu"] == (2, 3)
    assert backward["bias_silu"] == (1, 3)
    assert_as_meant(model, x, tolerance=1e-10)
    kept = {k.name for k in model.plan(x).kept if k.owner == "activation"}
    assert {"bias.output", "bias_silu: gate"} <= kept


def test_where_the_ops_before_are_not_there(bias_silu: Fusion) -> None:
    model, x = sequential(ops.ReLU(), ops.SiLU(), ops.Bias(8), ops.SiLU()), tensor(4, 5, 8)
    plan = model.plan(x)
    assert [(s.start, s.stop) for s in plan.forward if s.name == "bias_silu"] == [(1, 2), (3, 4)]
    assert [(s.start, s.stop) for s in plan.backward if s.name == "bias_silu"] == [(2, 4), (1, 2)]
    assert_as_meant(model, x, tolerance=1e-10)


def test_a_value_that_is_also_read_elsewhere(bias_silu: Fusion) -> None:
    """Then the longer match has no backward, and the shorter one does."""
    model, x = sequential(ops.Bias(8), ops.Fork("b"), ops.SiLU(), ops.Add("b")), tensor(4, 5, 8)
    assert steps(model, x, "backward")["bias_silu"] == (2, 3)
    assert_as_meant(model, x, tolerance=1e-10)


def test_without_gradients_only_the_forward_is_planned(bias_silu: Fusion) -> None:
    model, x = sequential(ops.Bias(8), ops.SiLU()), tensor(4, 5, 8, grad=False).requires_grad_(False)
    with torch.no_grad():
        assert steps(model, x, "forward")["bias_silu"] == (1, 2)
        torch.testing.assert_close(model(x), model.reference(x))


def test_it_verifies(bias_silu: Fusion) -> None:
    report = te_fuser.verify(bias_silu, ops=[[ops.Bias(8), ops.SiLU()]], dtypes=[torch.float64], kernels="reference")
    assert report.rows


def test_only_joint_fusions_have_it() -> None:
    with pytest.raises(ValueError, match="forward_ops is a number of ops of a joint fusion, got 1 for a forward one"):
        fusion(forward=[ops.SiLU], forward_ops=1, registered=False)
    with pytest.raises(ValueError, match="got -1 for a joint one"):
        fusion(joint=[ops.SiLU], forward_ops=-1, registered=False)

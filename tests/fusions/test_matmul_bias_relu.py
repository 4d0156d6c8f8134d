"""matmul_bias_relu: for plans without a backward."""

from __future__ import annotations

from te_fuser import ops
from tests.fusions.products import covered, plan, reasons


def test_without_a_backward() -> None:
    p = plan(ops.Linear(4096, 4096), ops.ReLU(), grad=False)
    assert covered(p.forward) == [("matmul_bias_relu", 0, 3)]


def test_with_a_backward_it_says_why_not() -> None:
    p = plan(ops.Linear(4096, 4096), ops.ReLU())
    why = "backward reads the value before the activation, and it gives only its output"
    assert reasons(p, "matmul_bias_relu") == {why}
    assert reasons(plan(ops.Linear(64, 64), ops.ReLU(), features=64, device=None, grad=False), "matmul_bias_relu") == {
        "cuBLASLt runs on cuda, the input is on cpu"
    }

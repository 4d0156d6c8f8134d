"""matmul_bias_relu: in plans whose backward reads ReLU's output."""

from __future__ import annotations

import pytest

from te_fuser import ops
from tests.fusions.products import covered, plan, reasons


def test_without_a_backward() -> None:
    p = plan(ops.Linear(4096, 4096), ops.ReLU(), grad=False)
    assert covered(p.forward) == [("matmul_bias_relu", 0, 3)]


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_with_a_backward_only_its_output_is_kept(memory: str) -> None:
    p = plan(ops.Linear(4096, 16384), ops.ReLU(), ops.Linear(16384, 4096), memory=memory)
    assert covered(p.forward)[0] == ("matmul_bias_relu", 0, 3)
    assert [k.name for k in p.kept if k.owner == "activation"] == ["relu.output"]


def test_reasons() -> None:
    assert reasons(plan(ops.Linear(64, 64), ops.ReLU(), features=64, device=None, grad=False), "matmul_bias_relu") == {
        "cuBLASLt runs on cuda, the input is on cpu"
    }

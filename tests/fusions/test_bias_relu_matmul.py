"""bias_relu_matmul_by_mask: ReLU's slope and the bias's gradient in the epilogue, by the mask that forward wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan import Plan
from te_fuser.ops.base import FusableOperation
from tests.fusions.products import covered, free, library_on_the_cpu, plan, reasons

NAME = "bias_relu_matmul_by_mask"


def mlp(inner: int = 16384) -> tuple[FusableOperation, ...]:
    return ops.Linear(4096, inner), ops.ReLU(), ops.Linear(inner, 4096)


def forced(*parts: FusableOperation) -> Plan:
    """The plan where the fusion costs nothing, with products and kernels as ever."""
    others = [n for n in fusions.names() if "by_mask" not in n]
    with fusions.only(free(fusions.get(NAME)), *others):
        return plan(*parts, memory="fast")


def test_one_product_gives_the_gradients_of_input_and_bias() -> None:
    p = forced(*mlp())
    assert covered(p.forward) == [(NAME, 0, 3), ("matmul_bias", 3, 5)]
    dgrad, wgrad = (s for s in p.backward if s.name == NAME)
    assert (dgrad.start, dgrad.stop) == (1, 4)
    assert [n for n, _ in dgrad.inputs] == ["dy", "2.weight", "mask"] and dgrad.chain
    assert [n for n, _ in dgrad.outputs] == ["input", "0.bias"]
    assert [n for n, _ in wgrad.inputs] == ["dy", "1.output"] and not wgrad.chain
    assert {k.name for k in p.kept if k.owner == "activation"} == {"relu.output", f"{NAME}: mask"}


def test_a_frozen_bias_needs_no_sum() -> None:
    first = ops.Linear(4096, 16384)
    model = te_fuser.Sequential(first, *mlp()[1:]).to("meta", torch.bfloat16)
    first.bias.requires_grad_(False)
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    p = model.plan(x, device="h200")
    assert reasons(p, NAME) == {"nobody needs the gradient of 0.bias, which it makes with input"}


@pytest.mark.parametrize("rows", [16, 8192])
def test_never_measured_it_is_left_to_tune(rows: int) -> None:
    p = plan(*mlp(), memory="fast", rows=rows)
    assert any("us more than" in r for r in reasons(p, NAME))


def test_a_bias_of_another_dtype() -> None:
    first = ops.Linear(64, 64)
    model = te_fuser.Sequential(first, ops.ReLU(), ops.Linear(64, 64)).to("meta", torch.bfloat16)
    first.bias = torch.nn.Parameter(torch.empty(64, device="meta"))
    p = model.plan(torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True), device="h200")
    assert reasons(p, NAME) == {"the bias is in torch.float32, the product in torch.bfloat16"}


def test_it_is_what_the_ops_mean(tmp_path: Path) -> None:
    lists = [[ops.MatMul(19, 131), ops.Bias(131), ops.ReLU(), ops.MatMul(131, 6)]]
    entry = dataclasses.replace(fusions.get(NAME), when=lambda m: m.needs_grad or "no backward")
    with library_on_the_cpu(tmp_path) as library:
        report = te_fuser.verify(entry, ops=lists, dtypes=[torch.bfloat16], device="cpu", kernels="reference")
        assert report.passed and len(report.rows) > 100
        assert library.products

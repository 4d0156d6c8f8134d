"""QuantizeGradient: values as they are, gradients in 8 bits, fused with what is behind it."""

from __future__ import annotations

import pytest
import torch

import te_fuser as te
from te_fuser import ops, verify
from te_fuser.formula.float8 import rounded
from tests.float8 import E5M2, FORMATS
from tests.needs import needs_compiler
from tests.ops.check import normal

WIDTH = 64
SCALE = torch.tensor(37.3)
KERNELS = ("reference", pytest.param("generated", marks=needs_compiler))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", FORMATS)
def test_values_as_they_are_and_gradients_rounded(dtype: torch.dtype, given: torch.dtype, kernels: str) -> None:
    model = te.Sequential(ops.QuantizeGradient(dtype), ops.Bias(WIDTH), kernels=kernels).to(given)
    x, dy = (normal(9, WIDTH).to(given) for _ in range(2))
    for run in (model, model.reference):
        x.requires_grad_()
        y = run(x, scale=SCALE)
        torch.testing.assert_close(y, x + model[1].bias)
        dx, dbias = torch.autograd.grad(y, [x, model[1].bias], dy)
        assert torch.equal(dx, rounded(dy.float() * SCALE, dtype).to(given))
        torch.testing.assert_close(dbias, dy.float().sum(0).to(given))


def test_it_costs_nothing_in_forward() -> None:
    plan = te.Sequential(ops.GELU(), ops.QuantizeGradient(E5M2)).plan(normal(9, WIDTH).float(), scale=SCALE)
    assert [step.name for step in plan.forward if step.cost.launches] == ["gelu_fwd"]


@needs_compiler
def test_verified() -> None:
    model = te.Sequential(ops.Bias(WIDTH), ops.QuantizeGradient(E5M2), ops.GELU(), ops.LayerNorm(WIDTH))
    assert verify(model, normal(9, WIDTH).float(), scale=SCALE).passed


def test_words() -> None:
    with pytest.raises(TypeError, match="float8_e4m3fn or"):
        ops.QuantizeGradient(torch.bfloat16)
    with pytest.raises(ValueError, match="scale"):
        te.Sequential(ops.QuantizeGradient(E5M2))(normal(9, WIDTH).float())

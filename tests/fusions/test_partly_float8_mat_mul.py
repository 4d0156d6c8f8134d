"""PartlyFloat8MatMul by cuBLASLt: which of its products are of 8 bits, and that they are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.kernels.quantize_weights import QuantizeWeights
from te_fuser.kernels.transposed8 import Transposed8
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Format
from tests.float8 import E4M3, E5M2
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.products import reasons
from tests.needs import needs_compiler

F, FFN = 32, 64
FORWARD, BACKWARD = "partly_float8_mat_mul", "partly_float8_mat_mul_backward"
SOME = [kept for kept in itertools.product((False, True), repeat=3) if any(kept) and not all(kept)]


def recipe(kept: tuple[bool, bool, bool], form: Format = Format.HYBRID) -> DelayedScaling:
    return DelayedScaling(override_linear_precision=kept, amax_history_len=3, fp8_format=form)


def planned(kept: tuple[bool, bool, bool], dtype: torch.dtype = torch.bfloat16, **how: Any) -> Plan:
    model = te.Sequential(ops.LayerNorm(F), ops.MatMul(F, FFN, **how), ops.GELU()).to(dtype).to_empty(device="meta")
    x = torch.empty(17, F, dtype=dtype, device="meta", requires_grad=True)
    with te.autocast(recipe=recipe(kept)):
        return model.plan(x, device="h200")


@pytest.mark.parametrize("kept", SOME)
def test_taken(kept: tuple[bool, bool, bool]) -> None:
    """With what quantizes the factors of those in 8 bits, and nothing else."""
    p = planned(kept)
    (y,) = [s for s in p.forward if s.name == FORWARD]
    dx, dw = (
        [s for s in p.backward if s.name == BACKWARD and name in dict(s.outputs)] for name in ("input", "0.weight")
    )
    steps = y, dx[0], dw[0]
    for step, wide in zip(steps, kept, strict=True):
        assert step.cost.launches == 1 if wide else step.cost.launches >= 3
        assert step.cost.dtype == (None if wide else "float8_e4m3fn" if step is y else "float8_e5m2")
    narrow, gradient = QuantizeWeights(E4M3), QuantizeWeights(E5M2)
    assert y.task.written == (() if kept[0] else (narrow,))
    assert dx[0].task.written == (() if kept[1] else (gradient, narrow))
    assert dw[0].task.written == (() if kept[2] else (gradient, narrow, Transposed8(E5M2), Transposed8(E4M3)))


def test_refused() -> None:
    p = planned((False, False, True), accumulate_into_main_grad=True)
    assert reasons(p, BACKWARD) == {"the weight's gradient goes to its main_grad"}
    model = te.Sequential(ops.MatMul(F, FFN, device="meta", dtype=torch.bfloat16))
    x = torch.empty(17, F, dtype=torch.bfloat16, device="meta")
    with te.autocast(enabled=False, calibrating=True):
        assert reasons(model.plan(x, device="h200"), FORWARD) == {
            "it is calibrating: amaxes are found by PyTorch's operations"
        }


def step(model: Any, seed: int, how: DelayedScaling, rows: int = 21) -> dict[str, torch.Tensor]:
    x = torch.randn(3, rows, F, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    with te.autocast(recipe=how):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(y, [x, *parameters], torch.cos(y.detach()))
    return {"output": y.detach(), **dict(zip(("x", *names), gradients, strict=True))}


@needs_compiler
@pytest.mark.parametrize("form", [Format.HYBRID, Format.E4M3])
@pytest.mark.parametrize("kept", SOME)
@pytest.mark.usefixtures("on_an_emulated_gpu")
def test_as_emulated(kept: tuple[bool, bool, bool], form: Format) -> None:
    """In values, gradients, scales and histories, over some steps."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(te.Sequential(ops.LayerNorm(F), ops.Linear(F, FFN), ops.GELU(), ops.Linear(FFN, F)))
    model, twin = made
    for seed in range(3):
        found = step(model, seed, recipe(kept, form))
        with fusions.disabled(FORWARD, BACKWARD):
            wanted = step(twin, seed, recipe(kept, form))
        for name, exact in wanted.items():
            apart = (found[name] - exact).double().square().mean().sqrt() / exact.double().square().mean().sqrt()
            assert apart <= 0.02, (name, apart)
    with te.autocast(recipe=recipe(kept, form)):
        names = [s.name for s in model.plan(torch.randn(3, 4, F).requires_grad_()).steps]
    assert names.count(FORWARD) == 2 and names.count(BACKWARD) == 4
    for (scale, history), other in zip(states(model).values(), states(twin).values(), strict=True):
        torch.testing.assert_close(scale, other[0], rtol=0.02, atol=0.0)
        torch.testing.assert_close(history, other[1], rtol=0.02, atol=0.0)

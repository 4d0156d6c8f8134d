"""Scales that a call makes: which steps plans have for them, what they read, and what is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.run.loading import execute, load
from te_fuser.fusions import Details
from te_fuser.recipe import Float8CurrentScaling, Recipe
from tests.fusions.emulated_gpu import on_an_emulated_gpu as on_an_emulated_gpu
from tests.needs import needs_compiler

F, WIDE, ROWS = 128, 256, 64
CURRENT = Float8CurrentScaling()


def planned(recipe: Recipe = CURRENT, device: str | None = "h200", grad: bool = True, **options: Any) -> Plan:
    """A norm and two products with a GELU between."""
    where = "meta" if device else "cpu"
    first, second = (ops.MatMul(*sizes, **options) for sizes in ((F, WIDE), (WIDE, F)))
    model = te_fuser.Sequential(ops.LayerNorm(F), first, ops.Bias(WIDE), ops.GELU(), second, ops.Bias(F))
    model = model.to(torch.bfloat16).to_empty(device=where)
    x = torch.empty(ROWS, F, dtype=torch.bfloat16, device=where, requires_grad=grad)
    with te_fuser.autocast(recipe=recipe), torch.set_grad_enabled(grad):
        return model.plan(x, device=device)


def names(steps: Any) -> list[str]:
    return [s.name for s in steps]


@pytest.mark.parametrize("device", ["h200", "l4", None])
def test_a_pass_and_a_small_step_before_each_kernel_that_quantizes(device: str | None) -> None:
    p = planned(device=device)
    made = [k for k, s in enumerate(p.steps) if s.name == "scale_of_amax"]
    assert len(made) == 4  # x and dy of two products
    for k in made:
        before, scale, kernel = p.steps[k - 1 : k + 2]
        assert before.name == f"{kernel.name}_amax" and not before.writes()
        (amax,), numbers = scale.reads(), scale.writes()
        assert amax in before.reads() and amax not in kernel.reads() and numbers[0] in kernel.reads()
        read = {r for s in p.steps[k + 1 :] for r in s.reads()}
        assert set(numbers) <= read


def test_a_tensor_that_a_kernel_stores_needs_no_pass() -> None:
    """The norm of the second branch hands its gradient to the bias of the first: as it is, or times a mask."""
    for behind in ([], [ops.Dropout(0.1)]):
        branches = [
            te_fuser.Residual(ops.LayerNorm(F), ops.Linear(F, WIDE), ops.GELU(), ops.Linear(WIDE, F), *behind)
            for _ in range(2)
        ]
        model = te_fuser.Sequential(*branches).to(torch.bfloat16).to_empty(device="meta")
        x = torch.empty(ROWS, F, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with te_fuser.autocast(recipe=CURRENT):
            p = model.plan(x, device="h200")
        assert names(p.steps).count("scale_of_amax") == 8
        assert sum(name.endswith("_amax") for name in names(p.steps)) - 8 == 7
        (raising,) = [s for s in p.backward if (d := s.task.description) is not None and d.maxima and d.stores]
        (maximum,) = raising.task.description.maxima  # type: ignore[union-attr]
        assert maximum.made_in == "bfloat16" and "layer_norm" in raising.name


def test_what_quantizes_on_its_way_says_why_not() -> None:
    @te_fuser.fusions.fusion(forward=[ops.GELU, ops.Quantize], details=Details(registered=False))
    def gelu_quantize(m: Any, x: Any) -> Any:
        """Would read a scale that nobody has made."""

    with te_fuser.fusions.only(gelu_quantize):
        p = planned(grad=False)
    (refused,) = [r for r in p.refusals if r.name == "gelu_quantize"]
    assert "the scale of" in refused.reason and "which has to be there first" in refused.reason
    assert names(p.forward).count("scale_of_amax") == 2


def numbers_of_a_call(rows: int) -> list[torch.Tensor]:
    """Scales, and their reciprocals, that the steps of a call make."""
    model = te_fuser.Sequential(ops.LayerNorm(F), ops.Linear(F, WIDE), ops.GELU(), ops.Linear(WIDE, F))
    x, found = torch.randn(rows, F).bfloat16().requires_grad_(), []

    def wrap(step: Any, runner: Any, slots: Any) -> Any:
        def run(tensors: Any) -> None:
            runner(tensors)
            if step.name == "scale_of_amax":
                found.extend([tensors[slots[ref]].clone() for ref in step.writes()])

        return run

    with te_fuser.autocast(recipe=CURRENT):
        (part,) = model.to(torch.bfloat16)._prepared()
        known, call = part.fuser.prepare(x, {}, ())  # type: ignore[union-attr]
        execute(load(known.plan, (), wrap=wrap), x, {}, call.parameters).sum().backward()
    return found


@needs_compiler
def test_where_there_are_no_rows_scales_are_those_of_an_amax_of_zero(on_an_emulated_gpu: None) -> None:
    """A kernel that has no rows is not launched."""
    assert [float(number) for number in numbers_of_a_call(0)] == [1.0] * 8
    assert all(float(number) not in (0.0, 1.0) for number in numbers_of_a_call(17))


def test_so_are_those_that_pytorch_makes() -> None:
    assert [float(number) for number in numbers_of_a_call(0)] == [1.0] * 8

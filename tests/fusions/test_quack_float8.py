"""quack's fusions of 8 bits, computed on an emulated GPU: over some steps as emulated, or nearer."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.products import free
from tests.fusions.regions import apart, data, mlp, near, states_near, step
from tests.kernels.packages import fake_quack_float8
from tests.needs import needs_compiler

pytestmark = [needs_compiler, pytest.mark.usefixtures("on_an_emulated_gpu")]
BIASED, ALONE, AUX = "float8_matmul_bias_quack", "float8_matmul_gelu_quack", "float8_matmul_gelu_quack_aux"
SUM, DROPOUT = "float8_matmul_add_bias_quack", "float8_matmul_add_bias_quack_dropout"
BF16, RECIPE = torch.bfloat16, DelayedScaling(amax_history_len=3)
OTHERS = ("stretch", "float8_matmul_bias", "float8_matmul_backward")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_quack_float8.Package]:
    """A package that computes, where a CPU stands for the GPU."""
    monkeypatch.setattr("te_fuser.fusions.quack.why_not_here", lambda *_: None)
    yield fake_quack_float8.in_place(monkeypatch)
    fake_quack_float8.forget()


def cheap(*names: str) -> tuple[Any, ...]:
    """Fusions of these names at no cost."""
    return tuple(free(fusions.get(name)) for name in names)


@pytest.mark.parametrize(
    ("name", "others", "call", "calls"), [(BIASED, OTHERS[::2], "sum_with_bias", 6), (AUX, OTHERS, "gelu_in_8_bits", 3)]
)
def test_fusion_over_some_steps_is_as_emulated(
    name: str, others: tuple[str, ...], call: str, calls: int, package: fake_quack_float8.Package
) -> None:
    """In values, gradients, scales and histories."""
    model, twin = mlp(dtype=BF16), mlp(dtype=BF16)
    for seed in range(3):
        with fusions.only(*cheap(name), *others):
            found = step(model, RECIPE, seed, dtype=BF16)
        with fusions.disabled(AUX, ALONE, BIASED):
            near(found, step(twin, RECIPE, seed, dtype=BF16))
    assert [made for made, _ in package.calls] == [call] * calls
    states_near(states(model), states(twin), 0.01)
    if name == BIASED:
        return
    x = data(9, 7).to(BF16)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        with fusions.only(*cheap(ALONE), *OTHERS[:2]):
            found_alone = model(x)
        with fusions.disabled(AUX, ALONE, BIASED):
            assert apart(found_alone, model(x)) < 0.02
    assert package.calls[-1][0] == "gelu_in_8_bits_alone" and len(package.calls) == calls + 1


def block(p: float | None, **how: Any) -> te.Sequential:
    """An MLP whose output is added to what it reads."""
    torch.manual_seed(0)
    layers = ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)
    inner = te.Residual(*layers, *([] if p is None else [ops.Dropout(p)]))
    return te.Sequential(ops.LayerNorm(32), inner, ops.Output("sum"), ops.LayerNorm(32), **how).to(BF16)


def trained(model: Any, seed: int, rows: int, recipe: Recipe) -> dict[str, torch.Tensor]:
    """Output of a call, the sum between too, and all gradients."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, rows, 32, generator=rng).to(BF16).requires_grad_()
    with te.autocast(recipe=recipe):
        y, between = model(x, outputs=["sum"])
    names, parameters = zip(*model.named_parameters(), strict=True)
    dys = [torch.randn(t.shape, generator=rng).to(BF16) for t in (y, between)]
    gradients = torch.autograd.grad((y, between), [x, *parameters], dys)
    return {"output": y.detach(), "sum": between.detach(), **dict(zip(("x", *names), gradients, strict=True))}


@pytest.mark.parametrize(("recipe", "p"), [(RECIPE, None), (Float8CurrentScaling(), 0.0)], ids=["delayed", "current"])
def test_sum_over_some_steps_is_as_without_it(
    p: float | None, recipe: Recipe, package: fake_quack_float8.Package
) -> None:
    """Of odd sizes and of one row; who else reads the sum finds it."""
    model = block(p)
    twin = copy.deepcopy(model)
    for seed, rows in enumerate((21, 1, 50)):
        with fusions.only(*cheap(SUM if p is None else DROPOUT), *OTHERS):
            found = trained(model, seed, rows, recipe)
        with fusions.only(*OTHERS):
            wanted = trained(twin, seed, rows, recipe)
        for key, exact in wanted.items():
            assert apart(found[key], exact) < (0.005 if key in ("output", "sum") else 0.07), key
    assert [called for called, _ in package.calls] == ["sum_with_bias_and_addend"] * 3


@pytest.mark.parametrize("p", [None, 0.0])
def test_sum_is_verified(p: float | None, package: fake_quack_float8.Package) -> None:
    """Against float64, in values and all gradients, and each step of a call."""
    model, x = block(p), torch.randn(21, 32).to(BF16).requires_grad_()
    with fusions.only(*cheap(SUM, DROPOUT), *OTHERS), te.autocast(recipe=RECIPE):
        assert [s.name for s in model.plan(x).forward if s.name in (SUM, DROPOUT)]
        if p is None:
            report = te.verify(model, x)
            assert report.passed, report
        block(p, verify=True)(x).sum().backward()


def test_sum_is_nearer_than_what_is_rounded_twice(package: fake_quack_float8.Package) -> None:
    small, errors = te.Sequential(te.Residual(ops.Linear(64, 64), ops.Dropout(0.1))).to(BF16).eval(), []
    x = torch.randn(160, 64).to(BF16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        exact = small.double().reference(x.double())
        small.bfloat16()
        for taken in ((DROPOUT,), ()):
            with fusions.only(*cheap(*taken), *OTHERS):
                errors.append(apart(small(x), exact))
    assert errors[0] < errors[1]

"""bias_gelu_matmul_quack: one product for three results in plans, else why not; and all gradients are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from tests.fusions.products import gelu_mlp, plan, reasons
from tests.fusions.quack_models import (
    AUX,
    BACKWARD,
    REFUSED,
    assert_cost,
    assert_main_grad_takes_the_gradient,
    assert_needs_the_weights_product,
    assert_takes_a_gradient_of_no_stride,
    frozen,
    install,
    mlp,
    names,
    on_the_cpu,
    small_mlps,
    step_of,
    under_autocast,
    unreadable,
)
from tests.kernels.packages import fake_quack
from tests.twins import assert_as_meant, sequential, tensor

ROWS, HIDDEN, INNER = 8192, 4096, 16384


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_nothing_but_the_value_before_is_kept(memory: str, installed: None) -> None:
    p = plan(*mlp(), memory=memory)
    step = step_of(p, BACKWARD)
    assert (step.start, step.stop) == (2, 5) and names(p.forward) == [AUX]
    assert [n for n, _ in step.inputs][:3] == ["dy", "0.output", "2.weight"]
    assert [n for n, _ in step.outputs] == ["input", "0.bias", "2.weight"]
    kept = {k.name for k in p.kept}
    assert "bias.output" in kept and not kept & {"gelu.output", "mat_mul.output"}


def test_its_cost_is_what_was_measured(installed: None) -> None:
    """The slope's product, GELU's output written by it, and the weight's gradient, one product more."""
    h, y, w = (2 * a * b for a, b in ((ROWS, INNER), (ROWS, HIDDEN), (INNER, HIDDEN)))
    dgrad, wgrad = (y + w + h, 2 * h), (y + h, w)
    assert_cost(BACKWARD, mlp, share=1.01, flops=2.0 * ROWS * HIDDEN * INNER, dgrad=dgrad, wgrad=wgrad)


def test_frozen_parameters(installed: None) -> None:
    """Even for the slope alone it spares a pass over dh; a weight's gradient that nobody needs costs nothing."""
    for name, outputs in (("1.bias", ["input", "2.weight"]), ("3.weight", ["input", "0.bias"])):
        assert [n for n, _ in step_of(frozen(mlp(), name), BACKWARD).outputs] == outputs
    assert [n for n, _ in step_of(frozen(mlp(), "1.bias", "3.weight"), BACKWARD).outputs] == ["input"]


def test_main_grad(installed: None) -> None:
    step = step_of(plan(*mlp(accumulate_into_main_grad=True)), BACKWARD)
    assert [n for n, _ in step.outputs] == ["input", "0.bias", "2.weight"]


def test_under_autocast_parameters_are_read_as_they_are_cast(installed: None) -> None:
    p = under_autocast(mlp())
    assert names(p.forward) == [AUX] and step_of(p, BACKWARD)


@pytest.mark.parametrize("rows", [16, 256])
def test_small_products_are_left_to_others(rows: int, installed: None) -> None:
    p = plan(*mlp(), rows=rows)
    assert not names(p.backward)
    (why,) = reasons(p, BACKWARD)
    assert "us more than matmul_bias_backward + gelu_matmul_bias_backward" in why


@pytest.mark.parametrize(("options", "gelu", "reason"), REFUSED)
def test_reasons(options: dict[str, Any], gelu: str, reason: str, installed: None) -> None:
    assert reasons(plan(*gelu_mlp(gelu, 64), **options), BACKWARD) == {reason}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("n_in", "n_out"), [(68, 64), (64, 68), (64, 0)])
def test_features_that_its_loads_cannot_read(n_in: int, n_out: int, installed: None) -> None:
    p = plan(ops.Bias(n_in), ops.GELU(), ops.MatMul(n_in, n_out), features=n_in)
    assert reasons(p, BACKWARD) == {unreadable(n_in, n_out)}


def test_the_bias_is_of_another_dtype(installed: None) -> None:
    model = Sequential(ops.Bias(64), ops.GELU(), ops.MatMul(64, 64)).to("meta", torch.bfloat16)
    model[0].bias.data = model[0].bias.data.float()
    x = torch.empty(16, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
    assert reasons(model.plan(x, device="h200"), BACKWARD) == {
        "the bias is in torch.float32, the product in torch.bfloat16"
    }


def test_where_cublaslt_has_no_weight_gradient(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is its product."""
    assert_needs_the_weights_product(monkeypatch, BACKWARD, mlp, at=2)


# ---- values -----------------------------------------------------------------------------------------------------


def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    package, its = on_the_cpu(monkeypatch)
    frozen = itertools.product((True, False), repeat=2)
    for (weight, bias), memory in itertools.product(frozen, ("fast", "lean")):
        for model, x in small_mlps(memory=memory):
            model[3].weight.requires_grad_(weight)
            model[1].bias.requires_grad_(bias)
            with fusions.only(*its, "stretch"):
                p = model.plan(x)
                assert names(p.forward) == [AUX] and step_of(p, BACKWARD)
                assert_as_meant(model, x, tolerance=1e-10)
    assert {name for name, _ in package.calls} == {"gelu_of_sum", "dgelu_with_sum"}
    fake_quack.forget()


def test_a_gradient_of_no_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(ops.Bias(24), ops.GELU("tanh"), ops.MatMul(24, 8))
    assert_takes_a_gradient_of_no_stride(monkeypatch, BACKWARD, model, tensor(5, 3, 24))


@pytest.mark.parametrize("over", [True, False])
def test_main_grad_takes_the_weights_gradient(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(ops.Bias(24), ops.GELU("tanh"), ops.Linear(24, 8, accumulate_into_main_grad=True))
    assert_main_grad_takes_the_gradient(monkeypatch, BACKWARD, model, tensor(7, 24), model[2].weight, over)


def test_main_grad_is_not_that_of_a_cast(installed: None) -> None:
    p = under_autocast(mlp(accumulate_into_main_grad=True))
    assert reasons(p, BACKWARD) == {"it reads the weight as it is cast, and main_grad is that of the weight itself"}
    assert "matmul_main_grad" in {s.name for s in p.backward}


def test_under_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weight and bias are cast, their gradients cast back."""
    package, its = on_the_cpu(monkeypatch)
    model = sequential(ops.Linear(16, 24), ops.GELU("tanh"), ops.MatMul(24, 8), dtype=torch.float32)
    x = tensor(7, 16, dtype=torch.float32)
    wanted = [x, *model.parameters()]
    exact = torch.autograd.grad(model.reference(x).square().sum(), wanted)
    with fusions.only(*its, "stretch"), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    found = torch.autograd.grad(y.float().square().sum(), wanted)
    assert {t["A"].dtype for _, t in package.calls} == {torch.bfloat16} and len(package.calls) == 2
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))
    fake_quack.forget()

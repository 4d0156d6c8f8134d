"""swiglu_matmul_quack: one product for three results in plans, else why not; and all gradients are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from te_fuser import fusions, ops
from te_fuser.fusions.swiglu_matmul_quack import _SHARE as SHARE
from te_fuser.kernels.packages import quack_matmul
from tests.fusions.products import plan, reasons
from tests.fusions.quack_models import (
    GATED,
    assert_cost,
    assert_main_grad_takes_the_gradient,
    assert_needs_the_weights_product,
    assert_takes_a_gradient_of_no_stride,
    frozen,
    gated_mlp,
    install,
    names,
    on_the_cpu,
    refused,
    small_gated_mlps,
    step_of,
    under_autocast,
    unreadable,
)
from tests.kernels.packages import fake_quack
from tests.twins import assert_as_meant, sequential, tensor

ROWS, HIDDEN, INNER = 8192, 4096, 14336


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_nothing_but_swiglus_input_is_kept(memory: str, installed: None) -> None:
    p = plan(*gated_mlp(), memory=memory)
    step = step_of(p, GATED)
    assert (step.start, step.stop) == (2, 4) and not names(p.forward)
    assert [n for n, _ in step.inputs][:3] == ["dy", "input", "1.weight"]
    assert [n for n, _ in step.outputs] == ["input", "1.weight"]
    kept = {k.name for k in p.kept}
    assert "mat_mul.output" in kept and "swiglu.output" not in kept


def test_its_cost(installed: None) -> None:
    """The product with both halves of the input and of its gradient, SwiGLU's output, and the weight's gradient."""
    half, y, w = (2 * a * b for a, b in ((ROWS, INNER), (ROWS, HIDDEN), (INNER, HIDDEN)))
    dgrad, wgrad = (y + w + 2 * half, 3 * half), (y + half, w)
    assert_cost(GATED, gated_mlp, share=SHARE, flops=2.0 * ROWS * HIDDEN * INNER, dgrad=dgrad, wgrad=wgrad)


def test_a_frozen_weight(installed: None) -> None:
    assert [n for n, _ in step_of(frozen(gated_mlp(), "3.weight"), GATED).outputs] == ["input"]


def test_main_grad(installed: None) -> None:
    step = step_of(plan(*gated_mlp(accumulate_into_main_grad=True)), GATED)
    assert [n for n, _ in step.outputs] == ["input", "1.weight"]


def test_under_autocast_the_weight_is_read_as_it_is_cast(installed: None) -> None:
    assert step_of(under_autocast(gated_mlp()), GATED)


@pytest.mark.parametrize("rows", [16, 256])
def test_small_products_are_left_to_others(rows: int, installed: None) -> None:
    p = plan(*gated_mlp(), rows=rows)
    assert not names(p.backward)
    (why,) = reasons(p, GATED)
    assert "us more than " in why


@pytest.mark.parametrize(("options", "reason"), refused("it is for bfloat16 alone"))
def test_reasons(options: dict[str, Any], reason: str, installed: None) -> None:
    assert reasons(plan(ops.SwiGLU(), ops.MatMul(64, 64), features=128, **options), GATED) == {reason}


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        (None, 'quack-kernels is not installed: pip install "quack-kernels>=0.6.5"'),
        ("0.6.4", 'it needs quack-kernels 0.6.5, found 0.6.4: pip install "quack-kernels>=0.6.5"'),
    ],
)
def test_the_package_is_missing_or_old(version: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, version)
    assert reasons(plan(*gated_mlp()), GATED) == {reason}


def test_the_package_cannot_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is asked where there is a GPU."""
    install(monkeypatch)
    monkeypatch.setattr(quack_matmul, "unusable_by_gates", lambda: "it does not load")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert reasons(plan(*gated_mlp()), GATED) == {"it does not load"}


def test_the_gate_is_the_second_half(installed: None) -> None:
    p = plan(ops.SwiGLU(gate_first=False), ops.MatMul(64, 64), features=128)
    assert reasons(p, GATED) == {
        "its gate is the first half of SwiGLU's input, and here it is the second (gate_first=False)"
    }


def test_other_gates_are_not_its_pattern(installed: None) -> None:
    for gate in (ops.ClampedSwiGLU(), ops.GEGLU(), ops.GLU()):
        p = plan(gate, ops.MatMul(INNER, HIDDEN), features=2 * INNER)
        assert not names(p.backward) and not reasons(p, GATED)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(("n_in", "n_out"), [(68, 64), (64, 68), (64, 0)])
def test_features_that_its_loads_cannot_read(n_in: int, n_out: int, installed: None) -> None:
    p = plan(ops.SwiGLU(), ops.MatMul(n_in, n_out), features=2 * n_in)
    assert reasons(p, GATED) == {unreadable(n_in, n_out)}


def test_where_cublaslt_has_no_weight_gradient(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is its product."""
    assert_needs_the_weights_product(monkeypatch, GATED, gated_mlp, at=1)


# ---- values -----------------------------------------------------------------------------------------------------


def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    package, its = on_the_cpu(monkeypatch)
    for weight, memory in itertools.product((True, False), ("fast", "lean")):
        for model, x in small_gated_mlps(memory=memory):
            model[3].weight.requires_grad_(weight)
            with fusions.only(*its, "stretch"):
                assert step_of(model.plan(x), GATED)
                assert_as_meant(model, x, tolerance=1e-10)
    assert {name for name, _ in package.calls} == {"dswiglu_of_halves"}
    fake_quack.forget()


def test_a_gradient_of_no_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(ops.SwiGLU(), ops.MatMul(24, 8))
    assert_takes_a_gradient_of_no_stride(monkeypatch, GATED, model, tensor(5, 3, 48))


@pytest.mark.parametrize("over", [True, False])
def test_main_grad_takes_the_weights_gradient(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(ops.SwiGLU(), ops.Linear(24, 8, bias=False, accumulate_into_main_grad=True))
    assert_main_grad_takes_the_gradient(monkeypatch, GATED, model, tensor(7, 48), model[1].weight, over)


def test_main_grad_is_not_that_of_a_cast(installed: None) -> None:
    p = under_autocast(gated_mlp(accumulate_into_main_grad=True))
    assert reasons(p, GATED) == {"it reads the weight as it is cast, and main_grad is that of the weight itself"}
    assert "matmul_main_grad" in {s.name for s in p.backward}

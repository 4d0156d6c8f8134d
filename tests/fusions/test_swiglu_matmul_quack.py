"""swiglu_matmul_quack: one product for three results in plans, else why not; and all gradients are right."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops
from te_fuser.fuser.plan import Plan, Step
from te_fuser.fusions.matmul_bias_gelu_quack import LAUNCHES
from te_fuser.fusions.swiglu_matmul_quack import _SHARE as SHARE
from te_fuser.kernels import quack_matmul
from tests.fusions.products import autocast_on_cuda, plan, reasons
from tests.fusions.quack_models import GATED, gated_mlp, install, names, on_the_cpu, small_gated_mlps
from tests.kernels import fake_quack
from tests.twins import assert_as_meant, assert_same_gradients, sequential, tensor

ROWS, HIDDEN, INNER = 8192, 4096, 14336

# (how the plan differs, why it is none for quack's kernels)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"device": None, "rows": 8}, "quack's kernels run on cuda, the input is on cpu"),
    ({"kernels": "reference"}, "this plan is one of PyTorch's operations alone"),
    ({"dtype": torch.float16}, "it is for bfloat16 alone, and this is torch.float16"),
    ({"dtype": torch.float32}, "it is for bfloat16 alone, and this is torch.float32"),
    ({"device": "a100"}, "it was measured on compute capability 9 alone, this GPU has 8.0"),
    ({"device": "b200"}, "it was measured on compute capability 9 alone, this GPU has 10.0"),
]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def step_of(p: Plan) -> Step:
    (step,) = (s for s in p.backward if s.name == GATED)
    return step


@pytest.mark.parametrize("memory", ["fast", "balanced", "lean"])
def test_nothing_but_swiglus_input_is_kept(memory: str, installed: None) -> None:
    p = plan(*gated_mlp(), memory=memory)
    step = step_of(p)
    assert (step.start, step.stop) == (2, 4) and not names(p.forward)
    assert [n for n, _ in step.inputs][:3] == ["dy", "input", "1.weight"]
    assert [n for n, _ in step.outputs] == ["input", "1.weight"]
    kept = {k.name for k in p.kept}
    assert "mat_mul.output" in kept and "swiglu.output" not in kept


def frozen(*parameters: str) -> Plan:
    """The MLP's, with some parameters that need no gradient."""
    model = Sequential(*gated_mlp()).to("meta", torch.bfloat16)
    for name in parameters:
        model.get_parameter(name).requires_grad_(False)
    x = torch.empty(ROWS, HIDDEN, dtype=torch.bfloat16, device="meta", requires_grad=True)
    return model.plan(x, device="h200")


def test_its_cost(installed: None) -> None:
    """The product with both halves of the input and of its gradient, SwiGLU's output, and the weight's gradient."""
    half, y, w = (2 * a * b for a, b in ((ROWS, INNER), (ROWS, HIDDEN), (INNER, HIDDEN)))
    dgrad, wgrad = (y + w + 2 * half, 3 * half), (y + half, w)
    flops = 2.0 * ROWS * HIDDEN * INNER
    cost = step_of(plan(*gated_mlp())).cost
    both = tuple(a + b for a, b in zip(dgrad, wgrad, strict=True))
    assert (cost.read, cost.written, cost.flops) == (*both, 2 * flops)
    assert 1 / cost.efficiency == pytest.approx((1 / SHARE + 1) / 2)
    assert cost.launches == LAUNCHES + 1
    alone = step_of(frozen("3.weight")).cost
    assert (alone.read, alone.written, alone.flops) == (*dgrad, flops)
    assert (alone.efficiency, alone.launches) == (SHARE, LAUNCHES)


def test_a_frozen_weight(installed: None) -> None:
    assert [n for n, _ in step_of(frozen("3.weight")).outputs] == ["input"]


def test_main_grad(installed: None) -> None:
    step = step_of(plan(*gated_mlp(accumulate_into_main_grad=True)))
    assert [n for n, _ in step.outputs] == ["input", "1.weight"]


def test_under_autocast_the_weight_is_read_as_it_is_cast(installed: None) -> None:
    model = Sequential(*gated_mlp()).to("meta")
    x = torch.empty(ROWS, HIDDEN, device="meta", requires_grad=True)
    with autocast_on_cuda():
        assert step_of(model.plan(x, device="h200"))


@pytest.mark.parametrize("rows", [16, 256])
def test_small_products_are_left_to_others(rows: int, installed: None) -> None:
    p = plan(*gated_mlp(), rows=rows)
    assert not names(p.backward)
    (why,) = reasons(p, GATED)
    assert "us more than " in why


@pytest.mark.parametrize(("options", "reason"), REFUSED)
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
    assert reasons(p, GATED) == {
        f"it reads and writes rows of a multiple of 8, and the product is of {n_in} to {n_out} features"
    }


def test_where_cublaslt_has_no_weight_gradient(installed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """That one is its product."""
    asked = []
    monkeypatch.setattr(
        "te_fuser.fusions.swiglu_matmul_quack.why_no_product",
        lambda m, kind, at: asked.append((kind, at)) or "no algorithm",
    )
    for accumulates, kind in ((False, "wgrad"), (True, "wgrad_onto")):
        assert reasons(plan(*gated_mlp(accumulate_into_main_grad=accumulates)), GATED) == {"no algorithm"}
        assert set(asked) == {(kind, 1)}
        asked.clear()


# ---- values -----------------------------------------------------------------------------------------------------


def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    package, its = on_the_cpu(monkeypatch)
    for weight, memory in itertools.product((True, False), ("fast", "lean")):
        for model, x in small_gated_mlps(memory=memory):
            model[3].weight.requires_grad_(weight)
            with fusions.only(*its, "stretch"):
                assert step_of(model.plan(x))
                assert_as_meant(model, x, tolerance=1e-10)
    assert {name for name, _ in package.calls} == {"dswiglu_of_halves"}
    fake_quack.forget()


def test_a_gradient_of_no_stride(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a sum, which is one number for all."""
    _, its = on_the_cpu(monkeypatch)
    model, x = sequential(ops.SwiGLU(), ops.MatMul(24, 8)), tensor(5, 3, 48)
    leaves = dict(model.named_parameters()) | {"x": x}
    want = torch.autograd.grad(model.reference(x).sum(), list(leaves.values()))
    with fusions.only(*its, "stretch"):
        assert step_of(model.plan(x))
        found = torch.autograd.grad(model(x).sum(), list(leaves.values()))
    assert_same_gradients(*(dict(zip(leaves, grads, strict=True)) for grads in (found, want)))
    fake_quack.forget()


@pytest.mark.parametrize("over", [True, False])
def test_main_grad_takes_the_weights_gradient(over: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, its = on_the_cpu(monkeypatch)
    down = ops.Linear(24, 8, bias=False, accumulate_into_main_grad=True)
    model, x = sequential(ops.SwiGLU(), down), tensor(7, 48)
    weight = model[1].weight
    dx, dw = torch.autograd.grad(model.reference(x).square().sum(), [x, weight])
    weight.main_grad, weight.overwrite_main_grad = torch.ones_like(weight), over
    weight.grad_added_to_main_grad = False
    with fusions.only(*its, "stretch"):
        assert step_of(model.plan(x))
        model(x).square().sum().backward()
    for found, exact in ((x.grad, dx), (weight.main_grad, dw if over else 1 + dw)):
        torch.testing.assert_close(found, exact, rtol=1e-10, atol=1e-10)
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    fake_quack.forget()

"""float8_matmul_add_bias_quack and its form with Dropout: where plans take them, else why not; and they are right."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS
from te_fuser.kernels.packages import quack_matmul
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, MMParams
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.products import reasons
from tests.fusions.quack_float8_models import RECIPE, as_installed, cheap, installed  # noqa: F401
from tests.kernels.packages import fake_quack_float8
from tests.needs import needs_compiler

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
F, ROWS = 4096, 8192
SUM, DROPOUT = NAMES = ("float8_matmul_add_bias_quack", "float8_matmul_add_bias_quack_dropout")
SPLIT = DelayedScaling(fp8_gemm_fprop=MMParams(use_split_accumulator=True))


def planned(
    device: str | None = "h200",
    dtype: torch.dtype = BF16,
    recipe: Any = RECIPE,
    p: float | None = 0.0,
    grad: bool = True,
    training: bool = True,
    other: torch.dtype | None = None,
    bias: torch.dtype | None = None,
    inner: int = F,
) -> Plan:
    """A norm, a product, and the sum with an input of the call behind it; without a name, for the CPU."""
    where, f, rows = ("meta", F, ROWS) if device else ("cpu", 64, 8)
    with torch.device("meta"):
        behind = [ops.Bias(f), *([] if p is None else [ops.Dropout(p)]), ops.Add("other")]
        model = te.Sequential(ops.LayerNorm(inner), ops.MatMul(inner, f), *behind).to(dtype)
    model = model.to_empty(device=where).train(training).requires_grad_(grad)
    if bias is not None:
        model[2].get_parameter("bias").data = torch.empty(f, dtype=bias, device=where)
    x = torch.empty(rows, inner, dtype=dtype, device=where, requires_grad=grad)
    added = torch.empty(rows, f, dtype=other or dtype, device=where, requires_grad=grad)
    with te.autocast(recipe=recipe), torch.set_grad_enabled(grad):
        return model.plan(x, device=device, other=added)


def sums(p: Plan) -> list[Step]:
    """The steps that are such products."""
    return [s for s in p.forward if s.name in NAMES]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inner", [F, 4 * F])
@pytest.mark.parametrize("p", [None, 0.0])
def test_taken(p: float | None, inner: int, grad: bool, recipe: Any) -> None:
    """Past what quantizes the gradient, of many terms too; it reads what it adds, and backward is what it was."""
    plan = planned(recipe=recipe, p=p, grad=grad, inner=inner)
    (step,) = sums(plan)
    assert step.name == (SUM if p is None else DROPOUT) and step is plan.forward[-1]
    cost = step.cost
    assert (cost.read, cost.written) == (inner * (ROWS + F) + 2 * ROWS * F, 2 * ROWS * F)
    assert (cost.flops, cost.dtype, cost.calls) == (2.0 * ROWS * F * inner, "float8_e4m3fn", CALLS)
    with fusions.disabled(*NAMES):
        apart = planned(recipe=recipe, p=p, grad=grad, inner=inner)
    assert [s.name for s in apart.forward][-1] == "add_fwd" and len(apart.forward) == len(plan.forward) + 1
    assert [(s.name, s.cost) for s in plan.backward] == [(s.name, s.cost) for s in apart.backward]
    assert [k.name for k in plan.kept] == [k.name for k in apart.kept]


@pytest.mark.usefixtures("installed")
def test_what_would_drop_while_training_drops_nothing_then() -> None:
    assert [s.name for s in sums(planned(p=0.1, training=False))] == [DROPOUT]


@pytest.mark.usefixtures("installed")
def test_a_layer() -> None:
    """Both of its sums; the norm between them reads the sum alone."""
    how: dict[str, Any] = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": BF16}
    with torch.device("meta"):
        layer = te.TransformerLayer(F, 4 * F, 32, **how)
        x = torch.empty(2048, 4, F, dtype=BF16, requires_grad=True)
    with te.autocast(recipe=RECIPE):
        plan = layer.plan(x, device="h200")
        with fusions.disabled(*NAMES):
            apart = layer.plan(x, device="h200")
    assert [s.name for s in sums(plan)] == [DROPOUT] * 2
    assert {"add_layer_norm_quantize_fwd", "add_fwd"} <= {s.name for s in apart.forward}
    assert not any(s.name.startswith("add_") for s in plan.forward)
    assert [s.name for s in plan.backward] == [s.name for s in apart.backward]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"p": 0.1}, "an epilogue drops nothing, and this Dropout does"),
    ({"p": 0.1, "grad": False}, "an epilogue drops nothing, and this Dropout does"),
    ({"other": F32}, "what is added is in torch.float32, the product in torch.bfloat16"),
    ({"dtype": F16}, "it was written for bfloat16, and this is float16"),
    ({"dtype": F32, "other": BF16}, "what is added is in torch.bfloat16, the product in torch.float32"),
    ({"bias": F32}, "the bias is in float32, the product in bfloat16"),
    (
        {"recipe": SPLIT},
        "it sums in fewer bits than float32 has, and the recipe says use_split_accumulator for forward",
    ),
    ({"device": "b200"}, "it was measured on compute capability 9 alone, this GPU has 10.0"),
    ({"device": "l4"}, "it was measured on compute capability 9 alone, this GPU has 8.9"),
    ({"device": None, "inner": 64}, "cuBLASLt runs on cuda, the input is on cpu; it is emulated"),
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("how", "why"), REFUSED)
def test_refused(how: dict[str, Any], why: str) -> None:
    plan = planned(**how)
    assert reasons(plan, DROPOUT) == {why} and not sums(plan)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quack_matmul.PACKAGE, "version", lambda: None)
    (why,) = reasons(planned(), DROPOUT)
    assert 'pip install "quack-kernels>=0.6.5"' in why


# ------------------------------------------------------------------------------------------- what runs is right


def block(p: float | None, **how: Any) -> te.Sequential:
    """An MLP whose output is added to what it reads."""
    torch.manual_seed(0)
    layers = ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)
    inner = te.Residual(*layers, *([] if p is None else [ops.Dropout(p)]))
    return te.Sequential(ops.LayerNorm(32), inner, ops.Output("sum"), ops.LayerNorm(32), **how).to(BF16)


def trained(model: Any, seed: int, rows: int, recipe: Any = RECIPE) -> dict[str, torch.Tensor]:
    """What a call gives, and all gradients."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(3, rows, 32, generator=rng).to(BF16).requires_grad_()
    with te.autocast(recipe=recipe):
        y, between = model(x, outputs=["sum"])
    names, parameters = zip(*model.named_parameters(), strict=True)
    dys = [torch.randn(t.shape, generator=rng).to(BF16) for t in (y, between)]
    gradients = torch.autograd.grad((y, between), [x, *parameters], dys)
    return {"output": y.detach(), "sum": between.detach(), **dict(zip(("x", *names), gradients, strict=True))}


def apart(found: torch.Tensor, exact: torch.Tensor) -> float:
    """How far, as a share of the root of the mean square."""
    return float((found.double() - exact.double()).square().mean().sqrt() / exact.double().square().mean().sqrt())


@needs_compiler
@pytest.mark.usefixtures("on_an_emulated_gpu")
@pytest.mark.parametrize("recipe", [RECIPE, Float8CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("p", [None, 0.0])
def test_right(p: float | None, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In values and all gradients, over some steps, of odd sizes and of one row; who else reads the sum finds it."""
    package = as_installed(monkeypatch)
    model, name = block(p), SUM if p is None else DROPOUT
    twin = copy.deepcopy(model)
    others = ("stretch", "float8_matmul_bias", "float8_matmul_backward")
    for seed, rows in enumerate((21, 1, 50)):
        with fusions.only(*cheap(name), *others):
            found = trained(model, seed, rows, recipe)
        with fusions.only(*others):
            wanted = trained(twin, seed, rows, recipe)
        for key, exact in wanted.items():
            assert apart(found[key], exact) < (0.005 if key in ("output", "sum") else 0.07), key
    assert [called for called, _ in package.calls] == ["sum_with_bias_and_addend"] * 3
    fake_quack_float8.forget()


@needs_compiler
@pytest.mark.usefixtures("on_an_emulated_gpu")
@pytest.mark.parametrize("p", [None, 0.0])
def test_verified(p: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against float64, in values and all gradients, and each step of a call; nearer than what is rounded twice."""
    as_installed(monkeypatch)
    model, x = block(p), torch.randn(50, 32).to(BF16).requires_grad_()
    others = ("stretch", "float8_matmul_bias", "float8_matmul_backward")
    with fusions.only(*cheap(SUM, DROPOUT), *others), te.autocast(recipe=RECIPE):
        assert len(sums(model.plan(x))) == 1
        report = te.verify(model, x)
        assert report.passed, report
        block(p, verify=True)(x).sum().backward()
    small, errors = te.Sequential(te.Residual(ops.Linear(64, 64), ops.Dropout(0.1))).to(BF16).eval(), []
    x = torch.randn(500, 64).to(BF16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        exact = small.double().reference(x.double())
        small.bfloat16()
        for taken in ((DROPOUT,), ()):
            with fusions.only(*cheap(*taken), *others):
                errors.append(apart(small(x), exact))
    assert errors[0] < errors[1]
    fake_quack_float8.forget()

"""quack's fusions, computed on the CPU: values and all gradients, what they need; those of 8 bits as emulated."""

from __future__ import annotations

import ast
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import te_fuser as te
from te_fuser import fusions, ops
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fusions import Fusion
from te_fuser.fusions.cublaslt import why_no_backward
from te_fuser.fusions.match import Match, MatchedOp
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import quack
from te_fuser.ops.base import Spec
from te_fuser.quantization import states
from te_fuser.recipe import DelayedScaling, Float8CurrentScaling, Recipe
from tests.fusions.emulated_gpu import on_an_emulated_gpu  # noqa: F401
from tests.fusions.models import QUACK, Parts, gated_mlp, installed, mlp, where, without
from tests.fusions.products import free, plan, reasons
from tests.fusions.regions import apart, data, near, states_near, step
from tests.fusions.regions import mlp as small_mlp
from tests.kernels.packages import fake_quack, fake_quack_float8
from tests.needs import needs_compiler
from tests.twins import assert_as_meant, assert_same_gradients, sequential, tensor

ALONE, AUX, BACKWARD = "matmul_bias_gelu_quack", "matmul_bias_gelu_quack_aux", "bias_gelu_matmul_quack"
GATED = "swiglu_matmul_quack"
NAMES = (ALONE, AUX, BACKWARD, GATED)
ROWS = ((7,), (3, 5), (1,), (2, 0))
# Of each fusion of backward: a small MLP, the list from its first op on with its features, and the list in a plan.
OF_BACKWARD: dict[str, tuple[Callable[..., Parts], Callable[..., Parts], int, Callable[..., Parts]]] = {
    BACKWARD: (lambda: [ops.LayerNorm(16), ops.Linear(16, 24), ops.GELU("tanh"), ops.Linear(24, 8)],
     lambda **how: [ops.Bias(24), ops.GELU("tanh"), ops.Linear(24, 8, **how)], 24, mlp),
    GATED: (lambda: [ops.RMSNorm(16), ops.Linear(16, 48, bias=False), ops.SwiGLU(), ops.Linear(24, 8, bias=False)],
     lambda **how: [ops.SwiGLU(), ops.Linear(24, 8, bias=False, **how)], 48, gated_mlp),
}  # fmt: skip
each = pytest.mark.parametrize("name", OF_BACKWARD)


def quacks(p: Plan) -> list[str]:
    """The steps that are quack's."""
    return [s.name for s in (*p.forward, *p.backward) if s.name in NAMES]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_quack.Package]:
    """A package that computes, with cuBLASLt's products beside it."""

    def multiply(kind: str, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert kind == "wgrad"
        return dy.reshape(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])

    def put(dy: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, add: bool = True) -> None:
        made = multiply("wgrad", dy, x)
        onto.add_(made) if add else onto.copy_(made)

    monkeypatch.setattr(products, "multiply", multiply)
    monkeypatch.setattr(products, "put_weight_gradient", put)
    yield fake_quack.in_place(monkeypatch)
    fake_quack.forget()


@pytest.fixture
def its(package: fake_quack.Package) -> dict[str, Fusion]:
    """Its fusions at no cost, with what they need of a GPU left out."""
    found = {name: dataclasses.replace(free(fusions.get(name)), when=None) for name in NAMES}
    found[ALONE] = dataclasses.replace(found[ALONE], when=lambda m: why_no_backward(m) or True)
    return found


def test_gelu_of_a_forward_is_right_with_a_backward_and_without(
    package: fake_quack.Package, its: dict[str, Fusion]
) -> None:
    for rows in ROWS:
        model, x = sequential(*OF_BACKWARD[BACKWARD][0]()), tensor(*rows, 16)
        for grad, taken, wanted in (
            (True, (its[ALONE], its[AUX]), [AUX]),
            (False, (its[ALONE], its[AUX]), None),
            (False, (its[ALONE],), [ALONE]),
        ):
            with fusions.only(*taken, "stretch"), torch.set_grad_enabled(grad):
                found = quacks(model.plan(x))
                assert found == wanted if wanted else len(found) == 1
                assert_as_meant(model, x, tolerance=1e-10)
    kept = {"D" in given for _, given in package.calls}
    assert {name for name, _ in package.calls} == {"gelu_of_sum"} and kept == {True, False}


@each
def test_gradients_of_any_that_are_needed_are_right(
    name: str, package: fake_quack.Package, its: dict[str, Fusion]
) -> None:
    """Of several leading dimensions, one row and none."""
    make, biases = OF_BACKWARD[name][0], (True, False) if name == BACKWARD else (True,)
    for weight, bias, memory, rows in itertools.product((True, False), biases, ("fast", "lean"), ROWS):
        model, x = sequential(*make(), memory=memory), tensor(*rows, 16)
        model[3].weight.requires_grad_(weight)
        if name == BACKWARD:
            model[1].bias.requires_grad_(bias)
        with fusions.only(*its.values(), "stretch"):
            assert quacks(model.plan(x)) == ([AUX, BACKWARD] if name == BACKWARD else [GATED])
            assert_as_meant(model, x, tolerance=1e-10)
    called = {"gelu_of_sum", "dgelu_with_sum"} if name == BACKWARD else {"dswiglu_of_halves"}
    assert {call for call, _ in package.calls} == called


@each
def test_gradient_of_no_stride_is_taken(name: str, its: dict[str, Fusion]) -> None:
    """Gradient of a sum, which is one number for all."""
    _, make, features, _ = OF_BACKWARD[name]
    model, x = sequential(*make()), tensor(5, 3, features)
    leaves = dict(model.named_parameters()) | {"x": x}
    want = torch.autograd.grad(model.reference(x).sum(), list(leaves.values()))
    with fusions.only(*its.values(), "stretch"):
        assert quacks(model.plan(x)) == [name]
        found = torch.autograd.grad(model(x).sum(), list(leaves.values()))
    assert_same_gradients(*(dict(zip(leaves, grads, strict=True)) for grads in (found, want)))


@each
@pytest.mark.parametrize("over", [True, False])
def test_main_grad_takes_the_gradient_and_is_missed(name: str, over: bool, its: dict[str, Fusion]) -> None:
    """The weight's, over what is there or added to it; other gradients are as ever, and without main_grad it raises."""
    _, make, features, _ = OF_BACKWARD[name]
    model, x = sequential(*make(accumulate_into_main_grad=True)), tensor(7, features)
    weight, wanted = model[-1].weight, [x, *model.parameters()]
    exact = torch.autograd.grad(model.reference(x).square().sum(), wanted)
    weight.main_grad, weight.overwrite_main_grad = torch.ones_like(weight), over
    weight.grad_added_to_main_grad = False
    with fusions.only(*its.values(), "stretch"):
        assert quacks(model.plan(x)) == [name]
        model(x).square().sum().backward()
        for leaf, gradient in zip(wanted, exact, strict=True):
            if leaf is weight:
                gradient = gradient if over else 1 + gradient
            found = weight.main_grad if leaf is weight else leaf.grad
            torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
        assert weight.grad_added_to_main_grad and not weight.grad.any()
        weight.main_grad = None
        with pytest.raises(RuntimeError, match="has no main_grad; set weight.main_grad"):
            model(x).sum().backward()


def test_gelu_under_autocast_casts_parameters_and_gradients_back(
    package: fake_quack.Package, its: dict[str, Fusion]
) -> None:
    model = sequential(ops.Linear(16, 24), ops.GELU("tanh"), ops.MatMul(24, 8), dtype=torch.float32)
    x = tensor(7, 16, dtype=torch.float32)
    wanted = [x, *model.parameters()]
    exact = torch.autograd.grad(model.reference(x).square().sum(), wanted)
    with fusions.only(*its.values(), "stretch"), torch.autocast("cpu", torch.bfloat16):
        y = model(x)
    found = torch.autograd.grad(y.float().square().sum(), wanted)
    assert {t["A"].dtype for _, t in package.calls} == {torch.bfloat16} and len(package.calls) == 2
    for ours, theirs in zip(found, exact, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0.03 * float(theirs.abs().max()))


# ---- what they need ------------------------------------------------------------------------------------------------


@each
def test_product_of_the_weight_that_cublaslt_has_not_is_the_reason(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int]] = []
    monkeypatch.setattr(
        "te_fuser.fusions.quack.why_no_product", lambda m, kind, at: asked.append((kind, at)) or "no algorithm"
    )
    make, at = OF_BACKWARD[name][3], 2 if name == BACKWARD else 1
    for accumulates, kind in ((False, "wgrad"), (True, "wgrad_onto")):
        found = where(QUACK, plan, *make(accumulate_into_main_grad=accumulates))
        assert reasons(found, name) == {"no algorithm"} and set(asked) == {(kind, at)}
        asked.clear()


def test_fusions_that_a_failure_names_are_all_that_call_it_and_say_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named = ast.literal_eval(quack._FUSIONS)
    for grad, make in itertools.product((True, False), (mlp, gated_mlp)):
        assert not quacks(where(QUACK, without, named, plan, *make(), grad=grad))
    # Other gates are not its pattern.
    for gate in (ops.ClampedSwiGLU(), ops.GEGLU(), ops.GLU()):
        p = where(QUACK, plan, gate, ops.MatMul(14336, 4096), features=2 * 14336)
        assert not quacks(p) and not reasons(p, GATED)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for asked, make, names in (("unusable", mlp, (AUX, BACKWARD)), ("unusable_by_gates", gated_mlp, (GATED,))):
        with installed(*QUACK), pytest.MonkeyPatch.context() as patch:  # which ends before what is installed does
            patch.setattr(quack, asked, lambda: "it does not load")
            p = plan(*make())
        assert all(reasons(p, name) == {"it does not load"} for name in names)


@pytest.mark.parametrize(
    ("dtypes", "reason"),
    [
        ((torch.float32, torch.bfloat16), "input and weight differ in dtype, torch.bfloat16 and torch.float32"),
        ((torch.bfloat16, torch.float32), "the bias is in torch.float32, the product in torch.bfloat16"),
        ((torch.bfloat16, torch.bfloat16), None),
    ],
)
def test_parameter_of_another_dtype_is_the_reason(dtypes: tuple[torch.dtype, torch.dtype], reason: str | None) -> None:
    x = Spec((8192, 64), torch.bfloat16, torch.device("cuda", 0))
    weight, bias = ({name: dtype} for name, dtype in zip(("weight", "bias"), dtypes, strict=True))
    parts = (
        MatchedOp(ops.MatMul(64, 64), {}, weight),
        MatchedOp(ops.Bias(64), {}, bias),
        MatchedOp(ops.GELU("tanh"), {}),
    )
    with installed(*QUACK):
        assert fusions.get(AUX).refusal(Match(parts, x, x, "cuda", True, (9, 0))) == reason


def emulated(test: Any) -> Any:
    """Mark of a test of 8 bits, on a GPU that a CPU stands for."""
    return needs_compiler(pytest.mark.usefixtures("on_an_emulated_gpu")(test))


BIASED, ALONE8, AUX8 = "float8_matmul_bias_quack", "float8_matmul_gelu_quack", "float8_matmul_gelu_quack_aux"
SUM, DROPOUT = "float8_matmul_add_bias_quack", "float8_matmul_add_bias_quack_dropout"
BF16, RECIPE = torch.bfloat16, DelayedScaling(amax_history_len=3)
OTHERS = ("stretch", "float8_matmul_bias", "float8_matmul_backward")


@pytest.fixture
def package8(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_quack_float8.Package]:
    """A package that computes, where a CPU stands for the GPU."""
    monkeypatch.setattr("te_fuser.fusions.quack.why_not_here", lambda *_: None)
    yield fake_quack_float8.in_place(monkeypatch)
    fake_quack_float8.forget()


def cheap(*names: str) -> tuple[Any, ...]:
    """Fusions of these names at no cost."""
    return tuple(free(fusions.get(name)) for name in names)


@emulated
@pytest.mark.parametrize(
    ("name", "others", "call", "calls"),
    [(BIASED, OTHERS[::2], "sum_with_bias", 6), (AUX8, OTHERS, "gelu_in_8_bits", 3)],
)
def test_fusion_over_some_steps_is_as_emulated(
    name: str, others: tuple[str, ...], call: str, calls: int, package8: fake_quack_float8.Package
) -> None:
    """In values, gradients, scales and histories."""
    model, twin = small_mlp(dtype=BF16), small_mlp(dtype=BF16)
    for seed in range(3):
        with fusions.only(*cheap(name), *others):
            found = step(model, RECIPE, seed, dtype=BF16)
        with fusions.disabled(AUX8, ALONE8, BIASED):
            near(found, step(twin, RECIPE, seed, dtype=BF16))
    assert [made for made, _ in package8.calls] == [call] * calls
    states_near(states(model), states(twin), 0.01)
    if name == BIASED:
        return
    x = data(9, 7).to(BF16)
    with te.autocast(recipe=RECIPE), torch.no_grad():
        with fusions.only(*cheap(ALONE8), *OTHERS[:2]):
            found_alone = model(x)
        with fusions.disabled(AUX8, ALONE8, BIASED):
            assert apart(found_alone, model(x)) < 0.02
    assert package8.calls[-1][0] == "gelu_in_8_bits_alone" and len(package8.calls) == calls + 1


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


@emulated
@pytest.mark.parametrize(("recipe", "p"), [(RECIPE, None), (Float8CurrentScaling(), 0.0)], ids=["delayed", "current"])
def test_sum_over_some_steps_is_as_without_it(
    p: float | None, recipe: Recipe, package8: fake_quack_float8.Package
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
    assert [called for called, _ in package8.calls] == ["sum_with_bias_and_addend"] * 3


@emulated
@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("p", [None, 0.0])
def test_sum_is_verified(p: float | None, package8: fake_quack_float8.Package) -> None:
    """Against float64, in values and all gradients, and each step of a call."""
    model, x = block(p), torch.randn(21, 32).to(BF16).requires_grad_()
    with fusions.only(*cheap(SUM, DROPOUT), *OTHERS), te.autocast(recipe=RECIPE):
        assert [s.name for s in model.plan(x).forward if s.name in (SUM, DROPOUT)]
        if p is None:
            report = te.verify(model, x)
            assert report.passed, report
        block(p, verify=True)(x).sum().backward()


@emulated
def test_sum_is_nearer_than_what_is_rounded_twice(package8: fake_quack_float8.Package) -> None:
    small, errors = te.Sequential(te.Residual(ops.Linear(64, 64), ops.Dropout(0.1))).to(BF16).eval(), []
    x = torch.randn(160, 64).to(BF16)
    with torch.no_grad(), te.autocast(recipe=RECIPE):
        exact = small.double().reference(x.double())
        small.bfloat16()
        for taken in ((DROPOUT,), ()):
            with fusions.only(*cheap(*taken), *OTHERS):
                errors.append(apart(small(x), exact))
    assert errors[0] < errors[1]

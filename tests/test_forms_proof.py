"""Ops of a user's that give a value in two forms, several values, and gradients in a dtype of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.formula import keep_mask, split
from te_fuser.fusions import Cost, fusion, unregister
from te_fuser.ops import op_table
from te_fuser.ops.base import Spec
from tests.forms import HalfProduct, TwoForms
from tests.needs import needs_compiler

WIDTH = 24


def model(kernels: str) -> Sequential:
    """A norm, the value in two forms, a product that reads one of them, a bias."""
    torch.manual_seed(0)
    made = Sequential(ops.LayerNorm(WIDTH), TwoForms(), HalfProduct(WIDTH), ops.Bias(WIDTH), kernels=kernels)
    for p in made.parameters():
        torch.nn.init.normal_(p, 0.3, 0.5)
    made[2].to(torch.bfloat16)
    made[3].to(torch.bfloat16)
    return made


def results(run: Any, leaves: list[torch.Tensor], x: torch.Tensor, *outputs: str) -> list[torch.Tensor]:
    """Outputs of a call, and the gradients of everything for normally distributed ones of its own."""
    made = run(x, outputs=outputs) if outputs else (run(x),)
    torch.manual_seed(1)
    dys = [torch.randn(y.shape, dtype=torch.float64).to(y.dtype) for y in made]
    return [*(y.detach() for y in made), *torch.autograd.grad(made, leaves, dys)]


def assert_as_reference(ours: Sequential, x: torch.Tensor, *outputs: str, tolerance: float = 2e-2) -> None:
    """Values and all gradients."""
    leaves = [x, *ours.parameters()]
    for a, b in zip(*(results(run, leaves, x, *outputs) for run in (ours, ours.reference)), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@needs_compiler
def test_a_value_in_two_forms_whose_gradient_comes_in_a_third_dtype() -> None:
    ours = model("generated")
    x = torch.randn(7, 3, WIDTH, requires_grad=True)
    plan = ours.plan(x, outputs=("wide",))
    first = plan.forward[0]
    assert (first.start, first.stop) == (0, 2) and first.name == "layer_norm_two_forms_fwd"
    made = {str(r.spec(plan.graph).dtype) for name, r in first.outputs if name.startswith("two_forms")}
    assert made == {"torch.bfloat16", "torch.float32"}
    (last,) = (s for s in plan.backward if s.name == "layer_norm_two_forms_bwd")
    arriving = {name: str(t.dtype) for name, t in zip(dict(last.inputs), last.task.description.loads, strict=False)}
    assert {v for name, v in arriving.items() if name.startswith("d_")} == {"float16", "float32"}

    leaves = [x, *ours.parameters()]
    got = results(ours, leaves, x, "wide")
    assert [t.dtype for t in got[:2]] == [torch.bfloat16, torch.float32]
    plain = results(ours.reference, leaves, x, "wide")  # rounds where plain PyTorch would, op by op
    exact = _exact(ours, x)
    for a, usual, right in zip(got, plain, exact, strict=True):
        least = 4 * torch.finfo(a.dtype if a.dtype != torch.float32 else torch.bfloat16).eps * right.abs().max()
        assert (a.double() - right).abs().max() <= 2 * (usual.double() - right).abs().max() + least
    # The wide form is rounded once, from what the formula gives: not by way of the narrow one.
    assert (got[1].double() - exact[1]).abs().max() < 1e-6


def _exact(ours: Sequential, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.detach().double().requires_grad_()
    norm, _, product, bias = ours
    given = [p.detach().double().requires_grad_() for p in (norm.weight, norm.bias, product.weight, bias.bias)]

    def run(x: torch.Tensor, outputs: tuple[str, ...]) -> tuple[torch.Tensor, ...]:
        wide = torch.nn.functional.layer_norm(x, (WIDTH,), given[0], given[1], norm.eps).tanh()
        return wide @ given[2].mT + given[3], wide

    torch.manual_seed(1)
    made = run(leaf, ())
    dys = [torch.randn(y.shape, dtype=torch.float64).to(d).double() for y, d in zip(made, DTYPES, strict=True)]
    return [*(y.detach() for y in made), *torch.autograd.grad(made, [leaf, *given], dys)]


DTYPES = (torch.bfloat16, torch.float32)


@needs_compiler
def test_steps_of_forms_are_verified() -> None:
    ours = model("generated")
    ours.verify = True
    x = torch.randn(7, 3, WIDTH, requires_grad=True)
    results(ours, [x, *ours.parameters()], x, "wide")


class Halves(ops.RowOp):
    """y = the first half times 2; the second half and all squares are values of their own."""

    values = ("rest", "squares")

    def named_outputs(self) -> tuple[str, ...]:
        return ("rest", "squares")

    def named_output(self, name: str, out: Spec) -> Spec:
        return Spec((*out.shape[:-1], out.features * (2 if name == "squares" else 1)), out.dtype, out.device)

    def compute(self, x: Any) -> Mapping[str, Any]:
        first, second = split(x, 2)
        return {"output": first * 2.0, "rest": second + 1.0, "squares": x * x}


class Product(ops.RowOp):
    """y = x * rest."""

    def compute(self, x: Any, rest: Any) -> Any:
        return x * rest


@pytest.mark.parametrize("kernels", ["generated", "reference"])
@pytest.mark.parametrize("between", [True, False])
def test_an_op_of_several_values(kernels: str, between: bool) -> None:
    """Each with features and a gradient of its own, read by a later op or by the caller, within a kernel or across."""
    parts = [ops.Linear(WIDTH // 2, WIDTH // 2)] if between else []
    torch.manual_seed(0)
    ours = Sequential(ops.LayerNorm(WIDTH), Halves(), *parts, Product(), ops.GELU(), kernels=kernels).double()
    if kernels == "generated":
        ours = ours.float()
    dtype = ours[0].weight.dtype
    for p in ours.parameters():
        torch.nn.init.normal_(p, 0.3, 0.5)
    x = torch.randn(7, 3, WIDTH, dtype=dtype, requires_grad=True)

    assert_as_reference(ours, x, "squares", tolerance=1e-5 if dtype == torch.float32 else 1e-12)
    norm = torch.nn.functional.layer_norm(x, (WIDTH,), ours[0].weight, ours[0].bias, ours[0].eps)
    torch.testing.assert_close(ours(x, outputs=("squares",))[1], norm * norm, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before", [[ops.MatMul(WIDTH, WIDTH)], [ops.LayerNorm(WIDTH), ops.Reshape(7, WIDTH)]])
def test_an_opaque_op_gets_its_gradient_in_its_own_dtype(before: list[torch.nn.Module]) -> None:
    assert_as_reference(
        Sequential(*before, HalfProduct(WIDTH)).bfloat16(), torch.randn(7, WIDTH).bfloat16().requires_grad_()
    )


@pytest.mark.parametrize("taken", [True, False])
def test_a_fusion_is_not_taken_where_its_gradient_has_another_dtype(taken: bool) -> None:
    dtypes = []

    @fusion(backward=[ops.SiLU], reads=["input"], cost=lambda m: Cost(seconds=1e-12))
    def own_dtype(m: Any, dy: torch.Tensor) -> torch.Tensor:
        dtypes.append((dy.dtype, m["input"].dtype))
        s = torch.sigmoid(m["input"])
        return dy * (s + m["input"] * s * (1 - s))

    after = ops.MatMul(WIDTH, WIDTH) if taken else HalfProduct(WIDTH)
    ours = Sequential(ops.MatMul(WIDTH, WIDTH), ops.SiLU(), after).bfloat16()
    try:
        x = torch.randn(7, WIDTH).bfloat16().requires_grad_()
        assert_as_reference(ours, x)
        assert taken or "arrives in float16, not in its own dtype" in " ".join(
            str(ours.explain(x, details=True)).split()
        )
    finally:
        unregister("own_dtype")
    assert dtypes == [(torch.bfloat16, torch.bfloat16)] * taken


@needs_compiler
def test_a_form_in_float64_is_computed_by_pytorch() -> None:
    """Kernels that are generated know no float64: then the whole plan runs without them, and says so."""
    ours = Sequential(ops.Linear(WIDTH, WIDTH), ops.GELU(), ops.Cast(torch.float64), ops.GELU())
    assert_as_reference(ours, x := torch.randn(7, WIDTH, requires_grad=True))
    assert "row kernels are not generated: torch.float64 runs the reference" in " ".join(
        str(ours.explain(x, details=True)).split()
    )


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        ("gives output, but by `values` it is to give output, b", {"compute": lambda self, x: x * 2.0}),
        ("gives b, but by `values` it is to give output, b", {"compute": lambda self, x: {"b": x}}),
        ("gives output, b, c, but", {"compute": lambda self, x: {"output": x, "b": x, "c": x}}),
        ("gives output, b, but by `values` it is to give output:", {"values": (), "named_outputs": lambda self: ()}),
        ("named_outputs.. leaves out 'b' of its `values`", {"named_outputs": lambda self: ()}),
        ("named_output.'b'. gives int32", {"named_output": lambda self, name, out: replace(out, dtype=torch.int32)}),
        ("named_output.'b'. gives a dtype; return a Spec", {"named_output": lambda self, name, out: torch.float32}),
        ("shape .3, 24., it needs .7, 24.", {"named_output": lambda self, name, out: replace(out, shape=(3, WIDTH))}),
        ("named_output.. says 48", {"named_output": lambda self, name, out: out.with_features(2 * WIDTH)}),
        ("output_dtype.. gives int32", {"output_dtype": lambda self, dtype: torch.int32}),
        ("gradient_dtype gives int32", {"gives_gradient_in": torch.int32}),
        ("draws by keep_mask; define draws", {"compute": lambda self, x: {"output": keep_mask(x, 0.5), "b": x}}),
    ],
)
def test_an_op_that_is_said_wrong(words: str, changed: dict[str, Any]) -> None:
    own = {
        "values": ("b",),
        "named_outputs": lambda self: ("b",),
        "compute": lambda self, x: {"output": x * 2.0, "b": x * 3.0},
    }
    kind = op_table.exports.row(True)(type("Wrong", (ops.RowOp,), own | changed))
    if (given := changed.get("gives_gradient_in")) is not None:
        op_table.gradient_dtype.add(lambda op, dtype: given, kind)
    model = Sequential(ops.GELU(), kind())
    with pytest.raises((TypeError, ValueError), match=rf"op 1 \(Wrong '1'\): .*{words}"):
        model.plan(torch.randn(7, WIDTH))


class One(ops.RowOp):
    """y = 1."""

    def compute(self, x: Any) -> Any:
        return 1.0


def test_a_formula_that_is_a_number() -> None:
    ours = Sequential(ops.LayerNorm(WIDTH), One(), ops.GELU(), ops.LayerNorm(WIDTH), kernels="reference")
    x = torch.randn(7, WIDTH, requires_grad=True)
    (y := ours(x)).sum().backward()
    torch.testing.assert_close(y, ours.reference(x))
    assert x.grad is not None and not x.grad.any() and ours[3].bias.grad.tolist() == [7.0] * WIDTH

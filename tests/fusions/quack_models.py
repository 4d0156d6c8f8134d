"""What the tests of quack's fusions share: the package as if installed, the MLPs that it was measured in, refusals.

And what is asserted of both fusions of the backward, each named by its fusion.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.steps.step import Step
from te_fuser.fusions.cublaslt import why_no_backward
from te_fuser.fusions.matmul_bias_gelu_quack import CALLS
from te_fuser.fusions.registry import Fusion
from te_fuser.kernels.cublaslt import products
from te_fuser.kernels.packages import quack_matmul
from te_fuser.ops import GELU, LayerNorm, Linear, RMSNorm, SwiGLU
from te_fuser.ops.base import FusableOperation
from tests.fusions.products import autocast_on_cuda, free, plan, reasons
from tests.kernels.packages import fake_quack
from tests.twins import assert_same_gradients, sequential, tensor

ALONE, AUX, BACKWARD = "matmul_bias_gelu_quack", "matmul_bias_gelu_quack_aux", "bias_gelu_matmul_quack"
GATED = "swiglu_matmul_quack"

ROWS = ((7,), (3, 5), (1,), (2, 0))


def refused(accuracy: str) -> list[tuple[dict[str, Any], str]]:
    """(how the plan differs, why it is none for quack's kernels), where `accuracy` says why for bfloat16 alone."""
    return [
        ({"device": None, "rows": 8}, "quack's kernels run on cuda, the input is on cpu"),
        ({"kernels": "reference"}, "this plan is one of PyTorch's operations alone"),
        ({"dtype": torch.float16}, f"{accuracy}, and this is torch.float16"),
        ({"dtype": torch.float32}, f"{accuracy}, and this is torch.float32"),
        ({"device": "a100"}, "it was measured on compute capability 9 alone, this GPU has 8.0"),
        ({"device": "b200"}, "it was measured on compute capability 9 alone, this GPU has 10.0"),
    ]


# (how the plan differs, GELU, why it is none for quack's kernels)
REFUSED = [
    *((o, "tanh", why) for o, why in refused("its tanh is right to 11 bits, which is enough for bfloat16 alone")),
    ({}, "none", "the epilogue's GELU is the tanh form, and this one is exact (erf)"),
]


def unreadable(n_in: int, n_out: int) -> str:
    """Why a product of these features is none for quack's loads."""
    return f"it reads and writes rows of a multiple of 8, and the product is of {n_in} to {n_out} features"


def install(patch: pytest.MonkeyPatch, version: str | None = fake_quack.VERSION) -> None:
    """The package as if it were there, for plans of a GPU that is not."""
    patch.setattr(quack_matmul.PACKAGE, "version", lambda: version)
    patch.setattr(quack_matmul, "unusable", lambda: None)


def mlp(**last: Any) -> tuple[FusableOperation, ...]:
    """LayerNorm, 4096 -> 16384, GELU, -> 4096, without memory; the last product is given what is named."""
    with torch.device("meta"):
        return LayerNorm(4096), Linear(4096, 16384), GELU("tanh"), Linear(16384, 4096, **last)


def gated_mlp(**last: Any) -> tuple[FusableOperation, ...]:
    """RMSNorm, 4096 -> 2 x 14336, SwiGLU, -> 4096, no biases, no memory; the last product is given what is named."""
    with torch.device("meta"):
        up, down = Linear(4096, 2 * 14336, bias=False), Linear(14336, 4096, bias=False, **last)
        return RMSNorm(4096), up, SwiGLU(), down


def names(steps: tuple[Any, ...]) -> list[str]:
    """Of quack's steps."""
    return [step.name for step in steps if step.name in (ALONE, AUX, BACKWARD, GATED)]


def on_the_cpu(patch: pytest.MonkeyPatch) -> tuple[fake_quack.Package, tuple[Fusion, ...]]:
    """A package that computes, and its fusions at no cost with what they need of a GPU left out."""
    package = fake_quack.in_place(patch)
    patch.setattr(products, "multiply", _multiply)
    patch.setattr(products, "put_weight_gradient", _put_weight_gradient)
    found = {name: free(fusions.get(name)) for name in (ALONE, AUX, BACKWARD, GATED)}
    unasked = {name: dataclasses.replace(fusion, when=None) for name, fusion in found.items()}
    unasked[ALONE] = dataclasses.replace(found[ALONE], when=lambda m: why_no_backward(m) or True)
    return package, tuple(unasked.values())


def _multiply(kind: str, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    assert kind == "wgrad"
    return dy.reshape(-1, dy.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def _put_weight_gradient(dy: torch.Tensor, x: torch.Tensor, onto: torch.Tensor, add: bool = True) -> None:
    made = _multiply("wgrad", dy, x)
    onto.add_(made) if add else onto.copy_(made)


def small_mlps(**options: Any) -> Iterator[tuple[Sequential, torch.Tensor]]:
    """MLPs in float64 and their inputs, of several leading dimensions, one row and none."""
    for rows in ROWS:
        model = sequential(LayerNorm(16), Linear(16, 24), GELU("tanh"), Linear(24, 8), **options)
        yield model, tensor(*rows, 16)


def small_gated_mlps(**options: Any) -> Iterator[tuple[Sequential, torch.Tensor]]:
    """The same with SwiGLU."""
    for rows in ROWS:
        model = sequential(RMSNorm(16), Linear(16, 48, bias=False), SwiGLU(), Linear(24, 8, bias=False), **options)
        yield model, tensor(*rows, 16)


# ---- of both fusions of the backward -------------------------------------------------------------------------------


def step_of(p: Plan, name: str) -> Step:
    """The one step of the backward that is this fusion's."""
    (step,) = (s for s in p.backward if s.name == name)
    return step


def frozen(layers: tuple[FusableOperation, ...], *parameters: str) -> Plan:
    """The MLP's plan, with some parameters that need no gradient."""
    model = Sequential(*layers).to("meta", torch.bfloat16)
    for name in parameters:
        model.get_parameter(name).requires_grad_(False)
    return model.plan(torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True), device="h200")


def under_autocast(layers: tuple[FusableOperation, ...]) -> Plan:
    """The MLP's plan, with parameters and input in float32 that are cast to bfloat16."""
    model = Sequential(*layers).to("meta")
    with autocast_on_cuda():
        return model.plan(torch.empty(8192, 4096, device="meta", requires_grad=True), device="h200")


def assert_cost(
    name: str,
    layers: Callable[[], tuple[FusableOperation, ...]],
    share: float,
    flops: float,
    dgrad: tuple[int, int],
    wgrad: tuple[int, int],
) -> None:
    """Of a product with (read, written) of `dgrad` at `share`, and where it is needed one more, of `wgrad`."""
    cost = step_of(plan(*layers()), name).cost
    both = tuple(a + b for a, b in zip(dgrad, wgrad, strict=True))
    assert (cost.read, cost.written, cost.flops) == (*both, 2 * flops), cost
    assert 1 / cost.efficiency == pytest.approx((1 / share + 1) / 2), cost
    assert (cost.launches, cost.calls) == (2, CALLS), cost
    alone = step_of(frozen(layers(), "3.weight"), name).cost
    assert (alone.read, alone.written, alone.flops) == (*dgrad, flops), alone
    assert (alone.efficiency, alone.launches, alone.calls) == (share, 1, CALLS), alone


def assert_needs_the_weights_product(
    patch: pytest.MonkeyPatch, name: str, layers: Callable[..., tuple[FusableOperation, ...]], at: int
) -> None:
    """It is refused where cuBLASLt has no gradient for the weight of its op `at`, or none onto main_grad."""
    asked = []
    patch.setattr(
        f"te_fuser.fusions.{name}.why_no_product",
        lambda m, kind, at: asked.append((kind, at)) or "no algorithm",
    )
    for accumulates, kind in ((False, "wgrad"), (True, "wgrad_onto")):
        found = reasons(plan(*layers(accumulate_into_main_grad=accumulates)), name)
        assert found == {"no algorithm"}, found
        assert set(asked) == {(kind, at)}, asked
        asked.clear()


def assert_takes_a_gradient_of_no_stride(
    patch: pytest.MonkeyPatch, name: str, model: Sequential, x: torch.Tensor
) -> None:
    """That of a sum, which is one number for all."""
    _, its = on_the_cpu(patch)
    leaves = dict(model.named_parameters()) | {"x": x}
    want = torch.autograd.grad(model.reference(x).sum(), list(leaves.values()))
    with fusions.only(*its, "stretch"):
        assert step_of(model.plan(x), name)
        found = torch.autograd.grad(model(x).sum(), list(leaves.values()))
    assert_same_gradients(*(dict(zip(leaves, grads, strict=True)) for grads in (found, want)))
    fake_quack.forget()


def assert_main_grad_takes_the_gradient(
    patch: pytest.MonkeyPatch, name: str, model: Sequential, x: torch.Tensor, weight: Any, over: bool
) -> None:
    """The weight's, over what is there or added to it; other gradients are as ever, and without main_grad it raises."""
    _, its = on_the_cpu(patch)
    wanted = [x, *model.parameters()]
    exact = torch.autograd.grad(model.reference(x).square().sum(), wanted)
    weight.main_grad, weight.overwrite_main_grad = torch.ones_like(weight), over
    weight.grad_added_to_main_grad = False
    with fusions.only(*its, "stretch"):
        assert step_of(model.plan(x), name)
        model(x).square().sum().backward()
    for leaf, gradient in zip(wanted, exact, strict=True):
        if leaf is weight:
            torch.testing.assert_close(weight.main_grad, gradient if over else 1 + gradient, rtol=1e-10, atol=1e-10)
        else:
            torch.testing.assert_close(leaf.grad, gradient, rtol=1e-10, atol=1e-10)
    assert weight.grad_added_to_main_grad and not weight.grad.any()
    weight.main_grad = None
    with fusions.only(*its, "stretch"), pytest.raises(RuntimeError, match="has no main_grad; set weight.main_grad"):
        model(x).sum().backward()
    fake_quack.forget()

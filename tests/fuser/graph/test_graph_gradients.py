"""Which values have a gradient: what nobody gives is none, what several give is their sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops, verify
from te_fuser.ops.base import Gradient, NamedInput, OpCall
from te_fuser.ops.operations import UnfusedOperation
from tests.fuser.pairs import WIDTH, Exported, Pair
from tests.twins import assert_as_meant


class Blind(UnfusedOperation):
    """y = x + mask.mean(), which gives no gradient of the mask."""

    reads = ()

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"mask": NamedInput("other", None, gradient=False)}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x + call["mask"].detach().mean()

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> Any:
        return dy


@pytest.mark.parametrize("asked", [(), ("other",)])
def test_a_value_that_nobody_reads_has_no_gradient(asked: tuple[str, ...]) -> None:
    ours = Sequential(ops.GELU(), Exported(), ops.GELU(), kernels="reference").double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    made = ours(x, outputs=asked) if asked else (ours(x),)
    made[0].sum().backward()
    assert Exported.seen == (True, bool(asked))  # of what the caller had and did not use there are zeros
    (want,) = torch.autograd.grad(ours.reference(x).sum(), x)
    torch.testing.assert_close(x.grad, want)


@pytest.mark.parametrize("first", [Pair(), ops.Fork("other")])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_reader_that_gives_no_gradient(first: ops.FusableOperation, kernels: str) -> None:
    ours = Sequential(ops.Bias(WIDTH), first, ops.MatMul(WIDTH, WIDTH), Blind(), kernels=kernels)
    assert_as_meant(ours, torch.randn(5, WIDTH, requires_grad=True), tolerance=1e-4)


@pytest.mark.parametrize("first", [Pair(), ops.Fork("other")])
@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_value_that_a_later_op_and_the_caller_read(first: ops.FusableOperation, kernels: str) -> None:
    ours = Sequential(ops.Bias(WIDTH), first, ops.MatMul(WIDTH, WIDTH), ops.Add("other"), kernels=kernels)
    x = torch.randn(5, WIDTH, requires_grad=True)
    leaves = [x, *ours.parameters()]
    made = [run(x, outputs=("other",)) for run in (ours, ours.reference)]
    for ends in ((0, 1), (0,), (1,)):
        got, want = (
            torch.autograd.grad([ys[k].square().sum() for k in ends], leaves, retain_graph=True, allow_unused=True)
            for ys in made
        )
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, torch.zeros_like(a) if b is None else b, rtol=1e-4, atol=1e-4)


class Dead(Pair):
    """Its main output has no gradient."""

    non_differentiable = ("output",)


def test_an_output_without_gradient_between_ops_with_parameters() -> None:
    ours = Sequential(ops.Bias(WIDTH), Dead(), ops.MatMul(WIDTH, WIDTH), ops.Add("other"), kernels="reference").double()
    assert_as_meant(ours, torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True))
    assert Dead.seen == (False, True)


def test_what_no_gradient_reaches_has_none() -> None:
    """As autograd has it, the parameters before an op that gives none stay without."""
    ours = Sequential(ops.Bias(WIDTH), Stopped(), ops.MatMul(WIDTH, WIDTH), kernels="reference")
    torch.nn.init.ones_(ours[2].weight)
    x = torch.randn(5, WIDTH, requires_grad=True)
    ours(x).sum().backward()
    assert x.grad is None and ours[0].bias.grad is None and ours[2].weight.grad is not None


class Stopped(UnfusedOperation):
    """y = 2 x without a gradient."""

    non_differentiable = ("output",)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_readers_of_a_value_in_either_order(order: tuple[int, int]) -> None:
    """One gives a gradient of it, the others none."""
    readers = [Blind(), ops.Add("other")]
    ours = Sequential(ops.Bias(WIDTH), Pair(), ops.GELU(), *(readers[k] for k in order)).double()
    assert_as_meant(ours, torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True))


class WeightAlone(UnfusedOperation):
    """y = x * weight, which gives the weight's gradient alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 2.0))

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("weight",), ("input",), "weight_gradient"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x * call["weight"]

    def weight_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"weight": (dy * call["input"]).sum(0)}

    def reference(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return x.detach() * call["weight"]


class NoGradients(WeightAlone):
    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return ()


class Ended(NoGradients):
    non_differentiable = ("output",)


@pytest.mark.parametrize("before", [(), (ops.Linear(WIDTH, WIDTH),), (ops.GELU(),)])
@pytest.mark.parametrize("behind", [(), (ops.GELU(),), (ops.Linear(WIDTH, WIDTH),)])
@pytest.mark.parametrize("kind", [WeightAlone, Ended])
def test_what_gradients_does_not_list_gets_none_as_after_detach(kind: Any, before: Any, behind: Any) -> None:
    """Also where the list ends there: what the op runs is no business of autograd's."""
    model, x = Sequential(*before, kind(), *behind), torch.randn(5, WIDTH, requires_grad=True)
    if before and behind:
        verify(model, x)
    y, wanted = model(x), [x, *model.parameters()]
    meant = model.reference(x)
    assert y.requires_grad == meant.requires_grad
    if y.requires_grad:
        dy = torch.randn_like(y)
        got, want = (torch.autograd.grad(r, wanted, dy, allow_unused=True) for r in (y, meant))
        assert [g is None for g in got] == [g is None for g in want] and got[0] is None
        torch.testing.assert_close([g for g in got if g is not None], [g for g in want if g is not None])


def test_gradients_that_list_nothing_are_an_error() -> None:
    words = r"op 1 \(NoGradients '1'\): its gradients\(\) lists none.*non_differentiable = \(\"output\",\)"
    with pytest.raises(ValueError, match=words):
        Sequential(ops.GELU(), NoGradients())(torch.randn(5, WIDTH))


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_gradient_that_nobody_gives_is_refused(kernels: str) -> None:
    """Of an input of the call; where another op reads it that gives one, that is all of it."""
    x, other = torch.randn(5, WIDTH), torch.randn(5, WIDTH, requires_grad=True)
    blind = Sequential(ops.GELU(), Blind(), kernels=kernels)
    with pytest.raises(TypeError, match=r"^op 1 \(Blind '1'\): 'other' requires a gradient, .* give other.detach\(\)$"):
        blind(x, other=other)
    with torch.no_grad():
        want = blind(x, other=other)
    torch.testing.assert_close(blind(x, other=other.detach()), want)
    for ours in (Sequential(Blind(), ops.Add("other")), Sequential(ops.Add("other"), Blind())):
        (found,) = torch.autograd.grad(ours(x, other=other).sum(), other)
        torch.testing.assert_close(found, torch.ones_like(other))

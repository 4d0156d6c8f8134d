"""The graph of a list: what reads what, shares storage and needs a gradient; which values have one, and its sum."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from te_fuser import Sequential, fusions, ops, verify
from te_fuser.formula import Axes, sigmoid
from te_fuser.ops.base import Gradient, NamedInput, OpCall
from te_fuser.ops.operations import UnfusedOperation
from tests.fuser.pairs import WIDTH, Exported, Pair
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(5, 8)


def graph_of(model, x=X, **arguments):
    return model.plan(x, **arguments).graph


def test_views_are_in_the_memory_of_what_they_view():
    model = sequential(ops.Reshape(4, 10), ops.Identity(), ops.Reshape(10, 4), ops.GELU(), ops.Reshape(5, 8))
    graph = graph_of(model)
    values = [graph.stored(graph.ref(n.output)).index for n in graph.nodes]
    gelu = graph.nodes[3].output
    assert values == [0, 0, 0, gelu, gelu]
    assert len({graph.roots[n.output] for n in graph.nodes}) == 4  # Identity alone is a name


def test_what_shares_storage():
    model = sequential(
        ops.Fork("a"), ops.Identity(), ops.Dropout(0.5), ops.GELU(), ops.Output("o"), ops.Add("a")
    ).eval()
    graph = graph_of(model, outputs=("o",))
    fork, identity, dropout, gelu, output, add = graph.nodes
    assert {graph.roots[v] for v in (fork.output, *fork.named_out, identity.output, dropout.output)} == {0}
    assert {graph.roots[v] for v in (gelu.output, output.output, *output.named_out)} == {gelu.output}
    assert graph.roots[add.output] == add.output
    assert graph_of(model.train(), outputs=("o",)).roots[dropout.output] == dropout.output


def needs(model, x, **inputs):
    graph = graph_of(model, x, **inputs)
    return [graph.needs_grad(n.output) for n in graph.nodes]


def test_needs_a_gradient_exactly_where_somebody_upstream_does():
    model = sequential(ops.Bias(8), ops.GELU(), ops.Linear(8, 8), ops.Add("c"), ops.Bias(8))
    frozen, fixed = X.detach(), tensor(5, 8, grad=False)
    assert needs(model, X, c=fixed) == [True] * 6
    with torch.no_grad():
        assert needs(model, X, c=fixed) == [False] * 6
    model.requires_grad_(False)
    assert needs(model, frozen, c=fixed) == [False] * 6
    model[4].bias.requires_grad_(True)
    assert needs(model, frozen, c=fixed) == [False] * 5 + [True]
    assert needs(model, frozen, c=tensor(5, 8)) == [False] * 4 + [True] * 2
    model[2].weight.requires_grad_(True)
    assert needs(model, frozen, c=fixed) == [False, False, True, True, True, True]
    assert graph_of(model, frozen, c=fixed).parameter_needs == (False, True, False, True)


# ---------------------------------------------------------------------------------------- axes of named inputs


def reader(axes, batch_dim=None):
    class Shifted(ops.RowOp):
        inputs = {"g": ops.NamedInput("factor", axes)}

        def batch_dim(self):
            return batch_dim

        def compute(self, x, g):
            return x * sigmoid(g) + g

    return sequential(ops.Bias(8), Shifted(), ops.SiLU())


# axes -> (the dimension that counts samples, a shape that fits [3, 4, 5, 8], one that does not, the wanted in words)
EXTENTS = {
    "full": (Axes.FULL, None, (3, 4, 5, 8), (3, 4, 1, 8), r"the main input \[3, 4, 5, 8\]; they must be equal"),
    "rows": (Axes.ROWS, None, (3, 4, 5, 1), (3, 4, 5), r"needs \[3, 4, 5, 1\]"),
    "samples_0": (Axes.SAMPLE_FEATURES, 0, (3, 8), (4, 8), r"needs \[3, 8\]"),
    "samples_1": (Axes.SAMPLE_FEATURES, 1, (4, 8), (3, 8), r"needs \[4, 8\]"),
    "batch": (Axes.BATCH, 1, (4,), (4, 1), r"needs \[4\]"),
    "feature": (Axes.FEATURE, None, (8,), (1, 8), r"needs \[8\]"),
    "none": (Axes.NONE, None, (1, 1), (2,), r"needs \[\]"),
}


@pytest.mark.parametrize("cut", [False, True], ids=["fused", "one by one"])
@pytest.mark.parametrize("name", EXTENTS)
def test_named_inputs_of_every_extent(name, cut):
    axes, batch_dim, fits, wrong, words = EXTENTS[name]
    model, x = reader(axes, batch_dim), tensor(3, 4, 5, 8)
    with fusions.only(*(() if cut else fusions.names())):
        assert_as_meant(model, x, factor=tensor(*fits, seed=1))
    with pytest.raises(ValueError, match=rf"op 1 \(Shifted '1'\): 'factor' has shape .*{words}"):
        model(x, factor=tensor(*wrong))


# ---------------------------------------------------------------------------------------- autocast


def kinds_under_autocast(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        graph = graph_of(model, x)
    return [(n.op.kind.__name__, graph.values[n.output].spec.dtype) for n in graph.nodes], graph


def test_autocast_leaves_float64_and_bfloat16_alone():
    for dtype in (torch.float64, torch.bfloat16):
        model = sequential(ops.LayerNorm(8), ops.Linear(8, 8), dtype=dtype)
        found, graph = kinds_under_autocast(model, tensor(5, 8, dtype=dtype))
        assert found == [("LayerNorm", dtype), ("MatMul", dtype), ("Bias", dtype)]
        assert not any(n.casts for n in graph.nodes)


# ---------------------------------------------------------------------------------------- ops that are no ops


# -------------------------------------------------------------------------------- gradients


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

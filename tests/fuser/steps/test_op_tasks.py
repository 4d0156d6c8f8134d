"""Opaque ops of several values, and what is said wrong; the hint for huge pages behind kernels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from te_fuser import Sequential, ops
from te_fuser.formula import split
from te_fuser.formula.expr import Axes
from te_fuser.fuser.steps import kernel_task
from te_fuser.ops import op_table
from te_fuser.ops.base import Gradient, NamedInput, OpCall, Spec, output_specs
from te_fuser.ops.operations import UnfusedOperation
from tests.fuser.pairs import WIDTH, Exported, Pair
from tests.needs import needs_compiler
from tests.twins import assert_as_meant


def test_an_op_alone_and_one_with_hooks() -> None:
    """Named values come from an op's own call, too, which is what a list runs where it has hooks."""
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    for op in (Exported(), Halves()):
        y, other = op(x, outputs=("other",))
        torch.testing.assert_close(other, 3 * x[..., : other.shape[-1]])
        assert torch.equal(op(x), y)
    for op in (Pair(), op_table.exports.row(False)(type("Named", (Halves,), {}))()):
        width = output_specs(op, Spec((5, WIDTH), torch.float64, torch.device("cpu")))["output"].features
        ours = Sequential(ops.Bias(WIDTH), op, ops.MatMul(width, width), ops.Add("other")).double()
        leaves = [x, *ours.parameters()]
        want = torch.autograd.grad(ours(x).square().sum(), leaves)
        seen: list[Any] = []
        op.register_forward_hook(lambda module, given, made: seen.append(made))  # noqa: B023
        for a, b in zip(torch.autograd.grad(ours(x).square().sum(), leaves), want, strict=True):
            torch.testing.assert_close(a, b)
        assert len(seen) == 1


@op_table.exports.row(True)
class Halves(ops.RowOp):
    """y = the first half of x, and three times that."""

    values = ("other",)

    def compute(self, x: Any) -> Any:
        first, _ = split(x, 2)
        return {"output": first, "other": 3.0 * first}


class Means(UnfusedOperation):
    """y = 2 x for x of [samples, tokens, features], and its means over each of these and all."""

    values = ("whole", "sample", "features", "feature", "row")
    reads = ()

    def infer(self, x: Spec) -> Mapping[str, Spec]:
        samples, tokens, features = x.shape
        shapes = ((), (samples,), (samples, features), (features,), (samples, tokens, 1))
        return {"output": x, **{n: replace(x, shape=shape) for n, shape in zip(self.values, shapes, strict=True)}}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        call.notes["shape"] = x.shape
        per_sample = x.mean((1, 2)), x.mean(1)
        means = (x.mean(), *per_sample, x.mean((0, 1)), x.mean(-1, keepdim=True))
        return {"output": 2 * x, **dict(zip(self.values, means, strict=True))}

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        samples, tokens, features = call.notes["shape"]  # type: ignore[misc]
        rows, width = tokens * features, samples * tokens
        dx = 2 * dy + call["d_whole"] / (width * features) + call["d_sample"][:, None, None] / rows
        return dx + call["d_features"][:, None] / tokens + call["d_feature"] / width + call["d_row"] / features


class UseMeans(ops.RowOp):
    """y = x (1 + whole) (1 + sample) (2 + features) (1 - feature) + row x."""

    inputs = {
        "whole": NamedInput("whole", Axes.NONE),
        "sample": NamedInput("sample", Axes.BATCH),
        "features": NamedInput("features", Axes.SAMPLE_FEATURES),
        "feature": NamedInput("feature", Axes.FEATURE),
        "row": NamedInput("row", Axes.ROWS),
    }

    def batch_dim(self) -> int:
        return 0

    def compute(self, x: Any, whole: Any, sample: Any, features: Any, feature: Any, row: Any) -> Any:
        return x * (1.0 + whole) * (1.0 + sample) * (2.0 + features) * (1.0 - feature) + row * x


@needs_compiler
@pytest.mark.parametrize("kernels", ["generated", "reference"])
@pytest.mark.parametrize("between", [True, False])
def test_values_of_every_extent_are_read_by_a_formula(kernels: str, between: bool) -> None:
    """One plan for several sizes; what the axes of a value are says who reads it."""
    parts = [ops.MatMul(WIDTH, WIDTH)] if between else []
    ours = Sequential(ops.LayerNorm(WIDTH), Means(), *parts, UseMeans(), ops.GELU(), kernels=kernels)
    exact = copy.deepcopy(ours).double()
    for samples, tokens in ((3, 5), (19, 5), (1, 1), (3, 21)):
        x = torch.randn(samples, tokens, WIDTH, requires_grad=True)
        wide = x.detach().double().requires_grad_()
        runs = (ours, [x, *ours.parameters()]), (exact.reference, [wide, *exact.parameters()])
        got, want = (torch.autograd.grad(run(leaves[0]).square().sum(), leaves) for run, leaves in runs)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-5 * b.abs().max().item())
    ours.verify = True
    ours(x).sum().backward()


# ---------------------------------------------------------------------------------------------- whole numbers


class Sorted(UnfusedOperation):
    """The rows' features in order, and the places that they had."""

    values = ("places",)
    reads = ("places",)

    def infer(self, x: Spec) -> Mapping[str, Spec]:
        return {"output": x, "places": replace(x, dtype=torch.int64)}

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        y, places = x.sort(-1)
        return {"output": y, "places": places}

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(dy).scatter_(-1, call["places"], dy)


class Unsorted(UnfusedOperation):
    """Puts the features back."""

    reads = ("places",)

    def named_inputs(self) -> Mapping[str, NamedInput]:
        return {"places": NamedInput("places", None)}

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("input",), ("places",), "whole_backward"),)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(x).scatter(-1, call["places"], x)

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return dy.gather(-1, call["places"])


@pytest.mark.parametrize("verify", [False, True])
def test_a_value_of_whole_numbers(verify: bool) -> None:
    ours = Sequential(ops.Bias(WIDTH), Sorted(), ops.Scale(WIDTH), Unsorted(), verify=verify)
    torch.nn.init.normal_(ours[2].weight)
    x = torch.randn(5, 3, WIDTH, requires_grad=True)
    _, places = ours(x, outputs=("places",))
    assert places.dtype == torch.int64 and not places.requires_grad
    assert_as_meant(ours, x, tolerance=1e-5)


class Embedding(UnfusedOperation):
    """y = the rows of a table by their numbers."""

    input_dtypes = (torch.int64,)

    def __init__(self, count: int) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(count, WIDTH))

    def infer(self, x: Spec) -> Spec:
        return Spec((*x.shape, WIDTH), self.table.dtype, x.device)

    def op_forward(self, call: OpCall, x: torch.Tensor) -> torch.Tensor:
        return call["table"][x]

    def gradients(self, names: tuple[str, ...]) -> tuple[Gradient, ...]:
        return (Gradient(("table",), ("input", "table"), "table_gradient"),)

    def table_gradient(self, call: OpCall, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
        made = torch.zeros_like(call["table"])
        return {"table": made.index_add_(0, call["input"].flatten(), dy.flatten(0, -2))}


@pytest.mark.parametrize("verify", [False, True])
def test_an_input_of_whole_numbers(verify: bool) -> None:
    ours = Sequential(Embedding(10), ops.LayerNorm(WIDTH), ops.Linear(WIDTH, WIDTH), verify=verify)
    x = torch.randint(0, 10, (4, 6))
    assert "input [4, 6] int64" in str(ours.explain(x, details=True))
    assert_as_meant(ours, x, tolerance=1e-4)


# ------------------------------------------------------------------------------------------ forward in two steps


class Later(Pair):
    """Pair that starts in one step and is waited for in another."""

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        return 2 * x, 3 * x

    def op_wait(self, call: OpCall, started: Any) -> Any:
        return dict(zip(("output", "other"), started, strict=True))


@pytest.mark.parametrize("verify", [False, True])
def test_values_of_an_op_that_waits(verify: bool) -> None:
    ours = Sequential(ops.Bias(WIDTH), Later(), ops.MatMul(WIDTH, WIDTH), ops.Add("other"), verify=verify).double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    names = [s.name for s in ours.plan(x).forward]
    assert names.index("later.start") < names.index("later.wait")
    assert_as_meant(ours, x)


@op_table.exports.row(True)
class Twice(Pair):
    """One tensor under two names."""

    def op_forward(self, call: OpCall, x: torch.Tensor) -> Any:
        y = 2 * x
        return {"output": y, "other": y}

    def op_backward(self, call: OpCall, dy: torch.Tensor) -> torch.Tensor:
        return 2 * (dy + call["d_other"])


def test_a_tensor_that_is_given_twice() -> None:
    ours = Sequential(ops.GELU(), Twice(), kernels="reference").double()
    x = torch.randn(5, WIDTH, dtype=torch.float64, requires_grad=True)
    got, want = (
        torch.autograd.grad([y.sum() for y in run(x, outputs=("other",))], x, list(torch.tensor([2.0, 3.0]).double()))
        for run in (ours, ours.reference)
    )
    torch.testing.assert_close(got, want)


Calls = list[tuple[int, int, int]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    seen: Calls = []
    monkeypatch.setattr(kernel_task, "_madvise", lambda: lambda *arguments: seen.append(arguments))
    return seen


def test_pages_lie_within_the_tensor(calls: Calls) -> None:
    t = torch.empty(kernel_task.LARGE + 12345, dtype=torch.uint8)
    kernel_task.prefer_huge_pages(t)
    ((start, size, _),) = calls
    assert start % 4096 == 0 and size % 4096 == 0
    assert t.data_ptr() <= start and start + size <= t.data_ptr() + t.nbytes
    assert size > t.nbytes - 2 * 4096


def test_small_and_absent_tensors_are_left_alone(calls: Calls) -> None:
    kernel_task.prefer_huge_pages(torch.empty(kernel_task.LARGE - 1, dtype=torch.uint8))
    kernel_task.prefer_huge_pages(torch.empty(2 * kernel_task.LARGE, dtype=torch.uint8, device="meta"))
    assert not calls


def test_the_system_takes_the_hint() -> None:
    t = torch.empty(kernel_task.LARGE, dtype=torch.uint8)
    kernel_task.prefer_huge_pages(t)
    t[0] = t[-1] = 7
    assert t[0] == t[-1] == 7

"""Stretches cut in several places: what each range's kernel must give; equal ones share their kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.codegen import description
from te_fuser.codegen.compiler import find_compiler
from te_fuser.codegen.description import NotOneKernel
from te_fuser.formula import Axes, exp, row_mean, row_min, row_sum, sigmoid
from te_fuser.fuser.plan import kernel_cache
from te_fuser.fuser.plan.plan import Plan
from te_fuser.fuser.plan.stretch import Stretch
from tests.fuzz.covers import random_cover
from tests.fuzz.lists import Softmax
from tests.twins import assert_as_meant, sequential, tensor


@pytest.mark.parametrize("branch", [(), (ops.GELU(),), (ops.Fork("inner"), ops.GELU(), ops.Add("inner"))])
def test_both_ends_of_a_fork_enter_one_range(branch: tuple[ops.FusableOperation, ...]) -> None:
    # Both are one leaf of its expressions, and each has a gradient that the fork's own backward reads.
    model = sequential(ops.Linear(4, 4), te_fuser.Residual(*branch), ops.GELU())
    with te_fuser.fusions.only():
        assert_as_meant(model, tensor(3, 4))


class Softmin(ops.RowOp):
    """exp(min(x) - x) over its sum."""

    def compute(self, x: Any) -> Any:
        e = exp(row_min(x) - x)
        return e / row_sum(e)


@pytest.mark.parametrize("kind", [Softmax, Softmin])
@pytest.mark.parametrize("seed", range(6))
def test_the_feature_that_is_picked_is_one_of_those_that_are_read(seed: int, kind: type[ops.RowOp]) -> None:
    # The maximum that forward took of float32 sums is above all of them once they are rounded to bfloat16: no feature
    # was the largest, and the gradient was divided by their number.
    model = te_fuser.Sequential(ops.Add("other"), kind(), ops.Scale(16), kernels="reference").to(torch.bfloat16)
    x, other = (tensor(64, 16, dtype=torch.bfloat16, seed=seed + k) for k in (0, 1))
    with random_cover(seed):
        model(x, other=other).float().square().sum().backward()
    got = x.grad
    x.grad = None
    model.reference(x, other=other).float().square().sum().backward()
    torch.testing.assert_close(got, x.grad, rtol=0.1, atol=0.02)


class Levelled(ops.RowOp):
    """Row op that replaces x by m for every feature; its sum over features is m times their number."""

    inputs = {"m": ops.NamedInput("m", Axes.ROWS)}

    def compute(self, x: Any, m: Any) -> Any:
        return x * row_sum(x - x + m) + (0 * x + m)


class Summed(ops.RowOp):
    """Every feature plus the sum of its row."""

    def compute(self, x: Any) -> Any:
        return x * 0.5 + row_sum(x)


class Level(ops.RowOp):
    """m for every feature of x."""

    inputs = {"m": ops.NamedInput("m", Axes.ROWS)}

    def compute(self, x: Any, m: Any) -> Any:
        return x - x + m


class Weighted(ops.Scale):
    """The weight of every row, whatever x is, and m."""

    inputs = {"m": ops.NamedInput("m", Axes.ROWS)}

    def compute(self, x: Any, weight: Any, m: Any) -> Any:
        return 0 * x + weight + 0 * m


LEVELS: dict[str, Callable[[], tuple[ops.FusableOperation, ...]]] = {
    "in_one_op": lambda: (Levelled(), ops.GELU()),
    "in_two": lambda: (ops.Scale(5), Level(), Summed()),
    "gated": lambda: (ops.Linear(5, 10), Level(), ops.SwiGLU(), Summed()),
    "of_weights": lambda: (Weighted(5), Summed(), ops.GELU()),
}


@pytest.mark.parametrize("name", LEVELS)
def test_a_value_that_lost_its_features_is_summed_over_all_of_them(name: str) -> None:
    x, m = tensor(7, 5), tensor(7, 1, seed=1)
    assert_as_meant(sequential(*LEVELS[name]()), x, m=m)
    with te_fuser.fusions.only():  # stored after every op: there it has every row and feature
        assert_as_meant(sequential(*LEVELS[name]()), x, m=m)


@pytest.mark.parametrize("name", LEVELS)
def test_so_it_is_in_generated_kernels(name: str) -> None:
    model, x = te_fuser.Sequential(*LEVELS[name]()), tensor(7, 5, dtype=torch.float32)
    m = tensor(7, 1, dtype=torch.float32, seed=1)
    assert model.plan(x, m=m).target == ("torch" if find_compiler() is None else "cpp")
    te_fuser.verify(model, x, m=m)


def test_reductions_below_reductions_are_cut_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gated op halves the tile: every reduction before it is rewritten once, not once for each part of one above."""
    rewritten: list[Any] = []
    in_parts = description._in_parts

    def counted(node: Any, *rest: Any) -> Any:
        rewritten.append(node)
        return in_parts(node, *rest)

    monkeypatch.setattr(description, "_in_parts", counted)
    norms = [ops.LayerNorm(32, 0.3 + 0.1 * k) for k in range(5)]
    x = torch.randn(3, 32, requires_grad=True)
    te_fuser.Sequential(*norms, ops.GLU()).plan(x)
    assert 10 <= len(rewritten) < 60


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.parametrize(
    ("parts", "name", "read"),
    [
        ((ops.Bias(6), ops.ReLU()), "bias_relu_bwd", {"relu.output"}),
        # The norm reads what ReLU read; a third tensor would be one more.
        ((ops.LayerNorm(6), ops.ReLU()), "layer_norm_relu_bwd", {"x", "layer_norm.weight", "layer_norm.bias"}),
        # Nobody stores what ReLU gives.
        ((ops.Bias(6), ops.ReLU(), ops.SiLU()), "bias_relu_silu_bwd", {"x", "bias.bias"}),
        # ReLU's output is squared before it is stored.
        ((ops.Bias(6), ops.SReLU()), "bias_srelu_bwd", {"x", "bias.bias"}),
    ],
)
def test_what_the_kernel_of_relus_slope_reads(
    parts: tuple[ops.FusableOperation, ...], name: str, read: set[str]
) -> None:
    dtype = torch.float32 if "relu_silu" in name or "srelu" in name else torch.bfloat16
    model = sequential(*parts, ops.MatMul(6, 3), kernels="generated", memory="fast", dtype=dtype)
    x = tensor(70, 6, dtype=dtype)
    (step,) = (s for s in model.plan(x).backward if s.name == name)
    assert {n for n, _ in step.inputs if n[:2] != "d_" and "statistic" not in n} == read
    te_fuser.verify(model, x)


class Long(ops.RowOp):
    """5,000 operations one above the other, with a mean of them taken off."""

    def compute(self, x: Any) -> Any:
        y = x
        for k in range(2500):
            y = y * (1 + (k % 7 - 3) / 64) + sigmoid(x) * ((k % 3 - 1) / 16)
        return y - row_mean(y)


def test_a_formula_may_be_deeper_than_pythons_stack() -> None:
    assert_as_meant(te_fuser.Sequential(Long(), kernels="reference").double(), tensor(3, 4, dtype=torch.float64))


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The derivations that a test makes, by direction; nothing is shared with other tests."""
    kernel_cache.forget()
    made: list[str] = []
    for name in ("forward", "backward"):
        plain = getattr(Stretch, name)

        def counted(self: Stretch, *args: Any, name: str = name, plain: Any = plain) -> Any:
            made.append(name)
            return plain(self, *args)

        monkeypatch.setattr(Stretch, name, counted)
    return made


def branch(features: int = 8, p: float = 0.1, eps: float = 1e-5) -> te_fuser.Residual:
    return te_fuser.Residual(
        ops.LayerNorm(features, eps), ops.Linear(features, 16), ops.GELU(), ops.Linear(16, features), ops.Dropout(p)
    )


def plan(*branches: te_fuser.Residual, dtype: torch.dtype = torch.float32) -> Plan:
    model = te_fuser.Sequential(*branches).to(dtype)
    return model.plan(torch.empty(4, 3, 8, dtype=dtype, requires_grad=True), device="h200")


def test_layers_of_one_model_are_derived_once(derived: list[str]) -> None:
    plan(branch(), branch(), branch())
    three = len(derived)
    derived.clear()
    plan(*(branch() for _ in range(6)))
    assert three > 0 and not derived


def test_models_share_too(derived: list[str]) -> None:
    first = plan(branch())
    derived.clear()
    second = plan(branch())
    assert not derived
    assert first.forward[0].task.description is second.forward[0].task.description  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "changed", [{"p": 0.2}, {"eps": 1e-3}, {"p": 0.0}, {"dtype": torch.bfloat16}, {"frozen": True}], ids=str
)
def test_another_formula_dtype_or_gradient_is_another_kernel(derived: list[str], changed: dict[str, Any]) -> None:
    plan(branch())
    derived.clear()
    other = branch(**{k: v for k, v in changed.items() if k in ("p", "eps")})
    other[0].requires_grad_("frozen" not in changed)
    plan(other, dtype=changed.get("dtype", torch.float32))
    assert derived


def test_results_and_refusals_are_those_of_the_stretch(derived: list[str]) -> None:
    graph = plan(branch(), branch()).graph
    for start, stop in ((0, 2), (7, 11)):
        shared, exact = kernel_cache.DerivedStretch(graph, start, stop), Stretch(graph, start, stop)
        for _ in range(2):
            assert shared.backward(start, stop, frozenset(), frozenset()) == exact.backward(start, stop, frozenset())


def test_what_a_range_does_not_make_is_no_part_of_what_its_kernels_depend_on(derived: list[str]) -> None:
    graph = plan(branch()).graph
    shared, none = kernel_cache.DerivedStretch(graph, 0, 2), frozenset[int]()
    made = {graph.roots[v] for n in graph.nodes[:2] for v in (n.output, *n.named_out)}
    others = frozenset(range(len(graph.values))) - made
    kernel_cache.forget()
    derived.clear()
    kernel = shared.backward(0, 2, none, none)
    assert kernel is shared.backward(0, 2, others, none) is shared.backward(0, 2, none, none, (), frozenset([5]))
    assert derived == ["backward"]
    with pytest.raises(NotOneKernel, match="it would read input, which the forward fusion does not give"):
        shared.backward(0, 2, none, frozenset([graph.nodes[0].input]))


def test_the_memory_is_bounded(derived: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_cache, "_KEPT", 5)
    plan(branch(), branch())
    assert len(kernel_cache._derived) <= 5

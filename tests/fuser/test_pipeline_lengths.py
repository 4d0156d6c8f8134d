"""Every length is a good length: which shapes a plan holds for, in whatever order; sizes that formulas give."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.formula import concat, split
from te_fuser.fuser import pipeline
from te_fuser.fuser.pipeline import make_exact_plan
from te_fuser.fuser.plan.device import device_named
from te_fuser.fuser.plan.tuned import signature
from te_fuser.ops.base import Spec
from te_fuser.ops.operations import UnfusedOperation
from tests.fuser.models import mlp
from tests.plans import models
from tests.twins import assert_as_meant, randomize, sequential, tensor


def attending(**options):
    return [
        ops.LayerNorm(16),
        ops.Linear(16, 48),
        ops.DotProductAttention(2, 8, layout="batch_first", **{"mask": "none", **options}),
        ops.Linear(16, 16),
        ops.Dropout(0.25),
    ]


LISTS = {
    "mlp": lambda: [ops.LayerNorm(16), ops.Linear(16, 32), ops.GELU(), ops.Linear(32, 16)],
    "attention": attending,
    "causal": lambda: [te_fuser.Residual(*attending(mask="causal")), ops.RMSNorm(16)],
    "reshaped": lambda: [ops.Linear(16, 24), ops.Reshape(-1, 8), ops.LayerNorm(8), ops.Dropout(0.5)],
    "samples": lambda: [ops.Linear(16, 16), ops.DropPath(0.5, batch_dim=0), ops.SiLU()],
}


@pytest.mark.parametrize(("name", "dtype"), zip(LISTS, itertools.cycle([torch.float32, torch.bfloat16])))
def test_in_whatever_order_they_come(name, dtype):
    """Results for a shape are equal, bit for bit, whatever a model has seen before."""
    shapes = [(samples, length, 16) for samples in (1, 3) for length in (1, 2, 3, 8, 33)]

    def run(order):
        model = randomize(te_fuser.Sequential(*LISTS[name]()).to(dtype))
        found = {}
        for shape in order:
            torch.manual_seed(1)
            x = tensor(*shape, dtype=dtype)
            model.zero_grad()
            y = model(x)
            y.float().square().mean().backward()
            found[shape] = [y, x.grad, *(p.grad for p in model.parameters())]
        return found

    want = run(shapes)
    for shape, made in run(random.Random(0).sample(shapes, len(shapes))).items():
        for one, other in zip(want[shape], made, strict=True):
            assert torch.equal(one, other), (name, shape)


def test_a_new_length_goes_neither_through_graph_nor_matching(monkeypatch):
    model = sequential(*attending(mask="given"))

    def call(samples, length, mask):
        hidden = torch.rand(*mask, generator=torch.Generator().manual_seed(0)) > 0.7
        return assert_as_meant(model.eval(), tensor(samples, length, 16), attention_mask=hidden)

    call(3, 5, (3, 1, 5, 5))
    for what in ("GraphBuilder", "make_plan"):
        monkeypatch.setattr(pipeline, what, lambda *a: pytest.fail("a shape with known answers was planned"))
    call(4, 7, (4, 1, 7, 7))
    call(3, 8, (3, 1, 8, 8))


def test_questions_are_asked_of_named_inputs_too():
    model = sequential(*attending(mask="given")).eval()
    x = tensor(4, 8, 16)
    model(x, attention_mask=torch.zeros(4, 1, 8, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"does not broadcast to \[batch, heads, queries, keys\] = \[4, 2, 8, 8\]"):
        model(x, attention_mask=torch.zeros(4, 1, 7, 8, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"has shape \[3, 1, 8, 8\]"):
        model(x, attention_mask=torch.zeros(3, 1, 8, 8, dtype=torch.bool))
    (kept,) = model.plans_kept()
    assert any("s2" in question for question in kept.questions[0])
    assert_as_meant(model, x, attention_mask=torch.rand(1, 2, 8, 8) > 0.7)


def test_no_unchecked_shape_runs():
    added = sequential(ops.Linear(8, 8), ops.Add("c"))
    added(tensor(8, 8), c=tensor(8, 8))
    with pytest.raises(ValueError, match=r"op 2 \(Add '1'\): 'c' has shape \[7, 8\], the main input \[8, 8\]"):
        added(tensor(8, 8), c=tensor(7, 8))
    fixed = sequential(ops.GELU(), ops.Reshape(4, 12, 8), ops.Bias(8))
    fixed(tensor(48, 8))
    for rows in (47, 32):  # of the same power of two, and of another
        with pytest.raises(ValueError, match=rf"op 1 \(Reshape '1'\): .* holds 384 elements, got {8 * rows}"):
            fixed(tensor(rows, 8))
    widened = sequential(ops.Reshape(4, -1), ops.LayerNorm(24))
    assert_as_meant(widened, tensor(12, 8))
    with pytest.raises(ValueError, match="made for 24 features, got 26"):
        widened(tensor(13, 8))
    per_sample = sequential(ops.AdaptiveLayerNorm(8, batch_dim=0))
    for samples in (3, 4):
        assert_as_meant(per_sample, tensor(samples, 5, 8), scale=tensor(samples, 8), shift=tensor(samples, 8, seed=2))
    with pytest.raises(ValueError, match=r"'scale' has shape \[3, 8\], needs \[4, 8\]"):
        per_sample(tensor(4, 5, 8), scale=tensor(3, 8), shift=tensor(3, 8))


# A condition -> which of 33 to 64 rows are planned with the first of them.
CONDITIONS = {
    "a bound": (lambda m: m.x.rows > 40, 33, range(33, 41)),
    "a divisor": (lambda m: m.x.rows % 8 == 0, 40, range(40, 65, 8)),
    "a shape": (lambda m: m.x.shape == (50, 8), 51, {*range(33, 65)} - {50}),
    "nothing": (lambda m: True, 33, range(33, 65)),
    "hidden in int()": (lambda m: int(m.x.rows) > 40, 50, {50}),
    "hidden in a key": (lambda m: m.x.rows in {40, 48}, 50, {50}),
    "a dtype": (lambda m: m.x.dtype == torch.float64, 33, range(33, 65)),
}


@pytest.mark.parametrize("name", CONDITIONS)
def test_which_lengths_a_condition_tells_apart(name, planned):
    when, first, alike = CONDITIONS[name]
    te_fuser.fusion(forward=[ops.SiLU], name="asking", when=when, cost=lambda m: fusions.Cost(seconds=0.0))(
        lambda m, x: F.silu(x)
    )
    model = sequential(ops.SiLU(), kernels="reference")
    found = set()
    for rows in range(33, 65):
        model[0] = ops.SiLU()  # nothing is kept
        model(tensor(first, 8, grad=False))
        before = len(planned)
        torch.testing.assert_close(model(tensor(rows, 8, grad=False)), F.silu(tensor(rows, 8, grad=False)))
        found |= {rows} if len(planned) == before else set()
    assert found == set(alike)


class Halved(UnfusedOperation):
    """The first half of the rows, by an infer() that takes none but plain numbers."""

    reads = ("input",)

    def infer(self, x: Spec) -> Spec:
        rows = torch.arange(x.shape[0]).numel() // 2
        if not isinstance(x.shape[0], int):
            raise TypeError("it takes plain numbers alone")
        return Spec((rows, *x.shape[1:]), x.dtype, x.device)

    def op_forward(self, call, x):
        return x[: x.shape[0] // 2].clone()

    def op_backward(self, call, dy):
        return torch.cat((dy, torch.zeros_like(call["input"][dy.shape[0] :])))


def test_what_takes_plain_numbers_alone_is_planned_for_each_shape(planned):
    model = sequential(ops.Linear(8, 8), Halved(), ops.GELU())
    for rows in (8, 6, 7, 8, 6):
        assert_as_meant(model, tensor(rows, 8))
    assert len(planned) == 3
    (kept,) = model.plans_kept()
    assert {questions for (questions,) in kept.questions} == {"s0 == 8", "s0 == 7", "s0 == 6"}


def test_plans_kept_are_told():
    model = mlp()
    assert model.plans_kept() == []
    for rows in (6, 7, 40):
        model(tensor(rows, 8))
    (kept,) = model.plans_kept()
    assert [tuple(shape) for (shape,) in kept.shapes] == [(40, 8), (7, 8), (6, 8)]
    assert str(kept).endswith("backward: for [40, 8], [7, 8], [6, 8]")
    with torch.no_grad():
        model(tensor(6, 8))
    assert [bool(k.plan.backward) for k in model.plans_kept()] == [False, True]


LAYERS = {
    "gpt": (lambda: models.gpt(1, 1024, 16, torch.bfloat16), lambda rows: (rows, 1, 1024)),
    "mlp": (lambda: [models.mlp_branch(4096, torch.bfloat16, 0.1)], lambda rows: (rows, 4096)),
}


@pytest.mark.parametrize("memory", ["fast", "balanced"])
@pytest.mark.parametrize("name", LAYERS)
def test_few_plans_do_for_all_rows(name, memory):
    """At most 6 for 1 to 65,536 rows, each predicted within 5% of the one that is made for exactly its rows."""
    parts, shape = LAYERS[name]
    with torch.device("meta"):
        fuser = te_fuser.Sequential(*parts(), memory=memory)._prepared()[0].fuser
    device, found = device_named("h200"), set()
    for rows in sorted({min(r, 65536) for k in range(0, 17, 2) for r in (1 << k, (1 << k) + 1, 45 << k >> 5)}):
        x = torch.empty(*shape(rows), dtype=torch.bfloat16, device="meta", requires_grad=True)
        plan = fuser.plan(x, {}, (), device)
        graph, options = fuser.plan_inputs(fuser.call(x, {}, ()), device=device)
        assert plan.seconds() <= 1.05 * make_exact_plan(graph.exact(), options).seconds()
        found.add(signature(plan))
    assert len(found) <= 6


class HalfScaled(ops.RowOp):
    """The first half, scaled."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1.0, 2.0, features))

    def compute(self, x: Any, weight: Any) -> Any:
        return split(x, 2)[0] * weight


class Beside(ops.RowOp):
    """x and another tensor, side by side."""

    def compute(self, x: Any, other: Any) -> Any:
        return concat([x, other])


def test_the_formula_says_how_many_features_come_out() -> None:
    model = te_fuser.Sequential(ops.Linear(4, 6), HalfScaled(3), Beside(), ops.GELU(), ops.Linear(6, 2)).double()
    x, other = torch.randn(5, 4).double().requires_grad_(), torch.randn(5, 3).double().requires_grad_()
    y = model(x, other=other)
    assert y.shape == (5, 2)
    torch.testing.assert_close(y, model.reference(x, other=other))
    leaves = [x, other, *model.parameters()]
    found, wanted = (torch.autograd.grad(f(x, other=other).sin().sum(), leaves) for f in (model, model.reference))
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)
    assert te_fuser.verify(model.float(), x.detach().float(), other=other.detach().float()).passed


def test_a_formula_that_is_a_number() -> None:
    class One(ops.RowOp):
        def compute(self, x: Any) -> Any:
            return 1.0

    x = torch.randn(3, 4)
    assert torch.equal(One()(x), torch.ones(3, 4))
    assert torch.equal(te_fuser.Sequential(One()).reference(x), torch.ones(3, 4))


class Affine(ops.RowOp):
    """y = x * weight + shift, with one number for all features, or one for each."""

    def __init__(self, *weight: int, shift: tuple[int, ...]) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(weight))
        self.shift = torch.nn.Parameter(torch.randn(shift))

    def compute(self, x: Any, weight: Any, shift: Any) -> Any:
        return x * weight + shift


@pytest.mark.parametrize(
    ("features", "weight", "shift", "kernels"),
    [(6, (1,), (), "auto"), (1, (1, 1, 1), (1,), "auto"), (6, (), (1, 1), "auto"), (1, (), (), "reference")],
)
def test_a_parameter_of_one_number_is_one_for_all_features(
    features: int, weight: tuple[int, ...], shift: tuple[int, ...], kernels: str
) -> None:
    model = te_fuser.Sequential(ops.Bias(features), Affine(*weight, shift=shift), ops.GELU(), kernels=kernels)
    te_fuser.verify(model, torch.randn(5, 3, features))
    assert_as_meant(model.double(), tensor(5, 3, features))
    op, x = model[1], tensor(5, features)
    leaves = (x, op.weight, op.shift)
    found = torch.autograd.grad(op(x).sin().sum(), leaves)
    wanted = torch.autograd.grad((x * op.weight.reshape(()) + op.shift.reshape(())).sin().sum(), leaves)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want)


class Powers(ops.RowOp):
    """x to powers that float32 does not hold."""

    powers = (1e300, -1e300, 3e38, -(2.0**64))

    def compute(self, x: Any) -> Any:
        return concat([x**power for power in self.powers])


def test_powers_that_float32_does_not_hold() -> None:
    x = torch.tensor([[1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan]])
    want = torch.cat([x.double().pow(power).float() for power in Powers.powers], -1)
    torch.testing.assert_close(te_fuser.Sequential(Powers())(x), want, equal_nan=True)

"""The planner: the cheapest cover in each direction, joint choices, what is kept, and that every plan is right."""

from __future__ import annotations

import itertools
import random
import warnings

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.plan import planner
from te_fuser.fuser.steps.op_tasks import FusionTask
from te_fuser.fusions import Cost, Details
from tests.plans.models import BF16, gpt
from tests.twins import assert_as_meant, sequential, tensor

X = tensor(6, 8)


# ------------------------------------------------------------------------------------------ the best cover

CHAIN = [ops.GELU, ops.SiLU, ops.ReLU, ops.GELU, ops.SReLU, ops.SiLU]
PLAIN = {
    ops.GELU: lambda x: F.gelu(x, approximate="tanh"),
    ops.SiLU: F.silu,
    ops.ReLU: F.relu,
    ops.SReLU: lambda x: F.relu(x).square(),
}


def chain_fusion(name, pattern, seconds):
    """A forward fusion of activations with a given price."""

    def body(m, x):
        for kind in pattern:
            x = PLAIN[kind](x)
        return x

    return te_fuser.fusion(
        forward=pattern, name=name, cost=lambda m: Cost(seconds=seconds), details=Details(registered=False)
    )(body)


def priced(ranges, prices):
    """One fusion for each range, for places where only that one fits."""
    return [
        chain_fusion(f"f{start}_{stop}", CHAIN[start:stop], price)
        for (start, stop), price in zip(ranges, prices, strict=True)
    ]


def cheapest(prices):
    """By trying every way to cut the chain: the lowest price and its cuts."""
    n, best = len(CHAIN), (float("inf"), [])
    for cuts in itertools.chain.from_iterable(itertools.combinations(range(1, n), k) for k in range(n)):
        parts = list(itertools.pairwise([0, *cuts, n]))
        if all(part in prices for part in parts):
            best = min(best, (sum(prices[part] for part in parts), parts))
    return best


@pytest.mark.parametrize("seed", range(8))
def test_the_cover_is_the_cheapest_whatever_the_order(seed):
    rng = random.Random(seed)
    ranges = [(a, b) for a, b in itertools.combinations(range(len(CHAIN) + 1), 2) if rng.random() < 0.6 or b == a + 1]
    prices = [rng.uniform(0.2, 1.0) * (b - a) ** 0.8 * 1e-9 for a, b in ranges]
    entries = priced(ranges, prices)
    found = {}
    for (start, stop), price in zip(ranges, prices, strict=True):
        # a pattern may fit in several places; every one counts
        for at in range(len(CHAIN) - (stop - start) + 1):
            if CHAIN[at : at + stop - start] == CHAIN[start:stop]:
                place = (at, at + stop - start)
                found[place] = min(price, found.get(place, float("inf")))
    want, parts = cheapest(found)
    model = sequential(*(kind() for kind in CHAIN))
    covers = []
    for order in (entries, entries[::-1], rng.sample(entries, len(entries))):
        for entry in order:
            fusions.register(entry)
        with torch.no_grad():
            plan = model.plan(X)
            torch.testing.assert_close(model(X), model.reference(X))
        covers.append([(s.start, s.stop) for s in plan.forward])
        assert sum(s.seconds for s in plan.forward) == pytest.approx(want, rel=1e-6)
        for entry in order:
            fusions.unregister(entry)
    assert covers == [parts] * 3


def joint(name, saves, price):
    """Bias and GELU, with what backward needs saved, or read from the plan."""

    class Body:
        @staticmethod
        def forward(m, x):
            m.emit("before", x + m[0].bias)
            return F.gelu(x + m[0].bias, approximate="tanh")

        @staticmethod
        def backward(m, dy):
            before = m["before"].detach().requires_grad_()
            with torch.enable_grad():
                d = torch.autograd.grad(F.gelu(before, approximate="tanh"), before, dy)[0]
            return d, {"0.bias": d.sum(0)}

    return te_fuser.fusion(joint=[ops.Bias, ops.GELU], name=name, saves=saves, cost=lambda m: price)(Body)


def test_a_joint_fusion_is_taken_in_both_directions_or_in_none():
    model = sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8), ops.GELU())
    for forward, backward, taken in ((0.0, 0.0, True), (0.0, 1.0, False), (1.0, 0.0, False)):
        entry = joint("both", ("before",), (Cost(seconds=forward), Cost(seconds=backward)))
        plan = model.plan(X)
        found = [sum(s.name == "both" for s in steps) for steps in (plan.forward, plan.backward)]
        assert found == ([2, 2] if taken else [0, 0])
        reasons = {r.reason for r in plan.refusals if r.name == "both"}
        assert all(r.startswith("predicted") and r.endswith("both directions together") for r in reasons)
        assert bool(reasons) == (not taken)
        assert_as_meant(model, X)
        with torch.no_grad():  # nothing has to be handed to a backward: forward alone decides
            assert sum(s.name == "both" for s in model.plan(X).forward) == (0 if forward else 2)
            torch.testing.assert_close(model(X), model.reference(X))
        fusions.unregister(entry)


@pytest.mark.parametrize("layers", [1, 3])
def test_joint_fusions_are_compared_by_both_directions(layers):
    """Backward's cost alone would take the first, forward's alone the second."""
    joint("quick_backward", ("before",), (Cost(seconds=5e-8), Cost(seconds=1e-8)))
    joint("quick_forward", ("before",), (Cost(seconds=1e-8), Cost(seconds=4e-8)))
    joint("quick", ("before",), (Cost(seconds=2e-8), Cost(seconds=2e-8)))
    model = sequential(*(kind() for kind in [lambda: ops.Linear(8, 8), ops.GELU] * layers))
    plan = model.plan(X)
    assert [[s.name for s in steps].count("quick") for steps in (plan.forward, plan.backward)] == [layers, layers]
    assert_as_meant(model, X)


def test_a_joint_fusion_may_pay_in_forward_alone():
    """Explicit math is dear in forward: what backward takes longer is less than what forward gains."""

    class Body:
        @staticmethod
        def forward(m, x):
            m.emit("x", x)
            return m[0].op.reference(x)

        @staticmethod
        def backward(m, dy):
            x = m["x"].detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(m[0].op.reference(x), x, dy)[0]

    model = sequential(ops.DotProductAttention(2, 4, mask="none", layout="sequence_first"))
    x = tensor(4, 8, 24)  # sizes that prices see as they are
    alone = model.plan(x)
    ahead, back = (sum(s.seconds for s in steps) for steps in (alone.forward, alone.backward))
    for gained, lost, taken in ((0.5, 0.4, True), (0.4, 0.5, False)):
        price = (Cost(seconds=ahead * (1 - gained)), Cost(seconds=back + ahead * lost))
        entry = te_fuser.fusion(
            joint=[ops.DotProductAttention], name="explicit", saves=["x"], cost=lambda m, price=price: price
        )(Body)
        assert ("explicit" in [s.name for s in model.plan(x).backward]) == taken
        ahead_alone = sequential(*model, ops.Linear(8, 8)).plan(x.detach())  # no gradient passes attention
        assert "explicit" in [s.name for s in ahead_alone.forward]
        fusions.unregister(entry)


def test_a_joint_fusion_that_ends_in_no_tensor_of_its_own_is_refused():
    """Identity hands its input through: there is no tensor that the fusion could make."""

    class Body:
        @staticmethod
        def forward(m, x):
            return x

        @staticmethod
        def backward(m, dy):
            return dy

    te_fuser.fusion(joint=[ops.Identity, ops.Identity], name="nothing", cost=lambda m: Cost(seconds=0.0))(Body)
    model = sequential(ops.GELU(), ops.Identity(), ops.Identity(), ops.Linear(8, 8))
    plan = model.plan(X)
    assert not [s for s in (*plan.forward, *plan.backward) if isinstance(s.task, FusionTask) and s.name == "nothing"]
    assert {r.reason for r in plan.refusals if r.name == "nothing"} == {"its last op makes no tensor of its own"}
    assert_as_meant(model, X)
    with torch.no_grad():
        torch.testing.assert_close(model(X), model.reference(X))


def test_two_fusions_that_overlap():
    """A joint one in the middle of what another forward fusion would cover."""
    joint("inner", ("before",), Cost(seconds=0.0))

    @te_fuser.fusion(forward=[ops.MatMul, ops.Bias], name="outer", cost=lambda m: Cost(seconds=0.0))
    def outer(m, x):
        return F.linear(x, m[0].weight, m[1].bias)

    model = sequential(ops.Linear(8, 8), ops.GELU(), ops.Linear(8, 8))
    plan = model.plan(X)
    assert [s.name for s in plan.forward] == ["mat_mul", "inner", "outer"]
    assert_as_meant(model, X)


# ------------------------------------------------------------------------------------------ what is kept


def mlp(**options):
    return sequential(
        ops.LayerNorm(8), ops.Linear(8, 16), ops.SwiGLU(), ops.Dropout(0.25), ops.Linear(8, 8), ops.GELU(), **options
    )


def kept(model, owner="activation", x=X, **inputs):
    return {k.name for k in model.plan(x, **inputs).kept if k.owner == owner}


def test_a_view_is_kept_in_the_memory_of_what_it_views():
    """Attention's backward reads its output, the product behind Reshape reads the same elements as a view."""
    attention = ops.DotProductAttention(2, 4, mask="causal", layout="sequence_first")
    model = sequential(ops.Linear(8, 24), attention, ops.Reshape(-1, 4), ops.Linear(4, 8))
    x = tensor(5, 3, 8)
    found = {k.name: k.bytes for k in model.plan(x).kept if k.owner == "activation"}
    assert {"dot_product_attention.output", "reshape.output"} <= set(found)
    assert sorted(found[n] for n in ("dot_product_attention.output", "reshape.output")) == [0, 5 * 3 * 8 * 8]
    assert model.plan(x).kept_bytes() == sum(found.values())
    assert_as_meant(model, x)


def test_a_view_of_the_calls_own_input_is_the_calls():
    model = sequential(ops.Reshape(-1, 4), ops.Linear(4, 8))
    plan = model.plan(X)
    assert [(k.name, k.owner) for k in plan.kept if k.owner != "parameter"] == [("reshape.output", "input")]
    assert plan.kept_bytes() == 0
    assert_as_meant(model, X)


def one_value_for_two_products(**options):
    branch = te_fuser.Residual(ops.Scale(8), ops.Linear(8, 8))
    listed = ops.Fork("a"), ops.Linear(8, 8, bias=False), branch, ops.Add("a"), ops.Linear(8, 8)
    return sequential(ops.Linear(8, 8), ops.GELU(), *listed, **options)


@pytest.mark.parametrize("make", [mlp, one_value_for_two_products])
def test_less_memory_is_kept_where_less_is_asked_for(make):
    held = [make(memory=memory).plan(X).kept_bytes() for memory in ("fast", "balanced", "lean", 0)]
    assert held == sorted(held, reverse=True) and held[-1] < held[0]


def test_budgets():
    x = tensor(8, 8)
    fast, least = (mlp(memory=m).plan(x).kept_bytes() for m in ("fast", 0))
    assert least < fast
    for budget in (least, (least + fast) // 2, fast):
        plan = mlp(memory=budget).plan(x)
        assert plan.kept_bytes() <= budget and not plan.notes
    assert mlp(memory=fast).plan(x).kept_bytes() == fast
    (note,) = mlp(memory=least - 1).plan(x).notes
    assert note == (
        f"no plan keeps within {least - 1} bytes; this one keeps the least, {least} bytes with sizes rounded up to "
        "powers of two"
    )


def test_budgets_see_sizes_on_the_grid():
    """Budgets for 5 to 8 rows are counted with 8; tables show the rows that there are."""
    plans = {rows: mlp(memory=2100).plan(tensor(rows, 8)) for rows in (4, 5, 7, 8)}
    assert {rows: plan.kept_bytes() for rows, plan in plans.items()} == {4: 4 * 320, 5: 5 * 256, 7: 7 * 256, 8: 8 * 256}


def test_a_backward_fusion_decides_what_is_kept():
    """A fusion that reads the output spares its ops' input; without it the input is kept."""

    @te_fuser.fusion(backward=[ops.SReLU], reads=["output"], name="by_output", cost=lambda m: Cost(seconds=0.0))
    def by_output(m, dy):
        return dy * 2 * m["output"].sqrt()

    model = sequential(ops.Linear(8, 8), ops.SReLU(), ops.Linear(8, 8), memory="fast")
    assert kept(model) == {"srelu.output"}
    assert_as_meant(model, X)
    with fusions.disabled("by_output"):
        assert kept(model) == {"bias.output", "srelu.output"} or kept(model) == {"mat_mul.output", "srelu.output"}


# ------------------------------------------------------------------------------------------ gradients that add up


def test_contributions_to_one_gradient_are_added_once():
    """Of a named input that is read twice, a scale that stands twice, and a product that stands three times."""
    scale, product = ops.Scale(8), ops.Linear(8, 8)
    model = sequential(scale, product, scale, product, ops.Add("c"), product, ops.Add("c"))
    c = tensor(6, 8, seed=3)
    sums = [s for s in model.plan(X, c=c).backward if s.name == "add_gradients"]
    assert sorted(len(s.inputs) for s in sums) == [2, 2, 3, 3]
    assert_as_meant(model, X, c=c)


# ------------------------------------------------------------------------------------------ a GPT layer

MIB = 2**20


def gpt_plan(memory):
    with torch.device("meta"):
        model = te_fuser.Sequential(*gpt(1, 4096, 32, BF16), memory=memory)
        return model.plan(torch.empty(2048, 4, 4096, dtype=BF16, requires_grad=True), device="h200")


def test_a_budget_is_filled():
    room_for_one_norm = gpt_plan("lean").kept_bytes() + 64 * MIB
    plan = gpt_plan(room_for_one_norm)
    assert plan.kept_bytes() == room_for_one_norm
    assert [c.recomputed for c in plan.choices if c.value == "layer_norm.output"].count(False) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_emitted_tensors_are_counted(dtype):
    explicit = ops.DotProductAttention(2, 4, dropout=0.1, mask="none", layout="sequence_first")
    x = tensor(5, 3, 24, dtype=dtype)
    plan = te_fuser.Sequential(explicit, kernels="reference", memory="fast").plan(x)
    size = 3 * 2 * 5 * (8 if dtype == torch.float64 else 4)
    assert {k.name.rpartition(": ")[2]: k.bytes for k in plan.kept}["logsumexp"] == size
    # Backward reads it beside dy, x and the seed, and goes over its scratch twice.
    scratch = 2 * explicit.scratch_bytes(plan.x)
    assert plan.backward[0].cost.read == size + x.nbytes // 3 + x.nbytes + 16 + scratch


# -------------------------------------------------------------------------------- large intermediate results


@pytest.fixture
def anew(monkeypatch):
    planner._warn_of_large.cache_clear()
    monkeypatch.setattr(planner, "_LARGE", 1000)


def messages(model, x, **inputs):
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model(x, **inputs)
    return [str(w.message) for w in found]


def test_said_once_with_the_reason(anew):
    capped = ops.AttentionScores(soft_cap=1.0)
    model = sequential(ops.DotProductAttention(2, 4, layout="batch_first", scores=capped, mask="none"))
    assert messages(model, tensor(1, 7, 24)) == []  # 8 * 2 * 49 bytes
    (said,) = messages(model, tensor(2, 7, 24))
    assert "op 0 (DotProductAttention '0') by explicit intermediate results of more than 1 GiB" in said
    assert "attention_cpu_flash: it is not called for a soft cap" in said
    assert messages(model, tensor(2, 9, 24)) == []


def test_keys_count_and_a_kernel_is_silent(anew):
    op = ops.DotProductAttention(2, 4, layout="batch_first", packing="apart", mask="none")
    x, inputs = tensor(2, 3, 8), {n: tensor(2, 11, 8) for n in ("key", "value")}
    assert messages(sequential(op), x, **inputs) == []
    with fusions.only():
        (said,) = messages(sequential(op), x, **inputs)
    assert said.endswith("(no fusion that could take it is on)")
    with fusions.only(), torch.no_grad():
        assert messages(sequential(op), x, **{n: t[:, :2] for n, t in inputs.items()}) == []

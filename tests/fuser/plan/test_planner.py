"""The planner: the cheapest cover in each direction, joint choices, what is kept, and that every plan is right."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F

import te_fuser
from te_fuser import fusions, ops
from te_fuser.fuser.graph.refs import RECOMPUTED, STATISTIC, VALUE
from te_fuser.fuser.steps.op_tasks import FusionTask
from te_fuser.fusions import Cost, Details
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


def test_a_dearer_fusion_loses_and_the_plan_says_by_how_much():
    fusions.register(chain_fusion("dear", [ops.SiLU, ops.ReLU], 1.0))
    fusions.register(chain_fusion("cheap", [ops.GELU, ops.SiLU], 0.0))
    with torch.no_grad():
        plan = sequential(*(kind() for kind in CHAIN)).plan(X)
    assert "cheap" in [s.name for s in plan.forward]
    (reason,) = (r.reason for r in plan.refusals if r.name == "dear")
    assert "us more than" in reason and float(reason.split()[1]) == pytest.approx(1e6, rel=0.01)


def test_both_directions_are_covered_for_themselves():
    """A forward fusion makes forward split where backward does not."""
    fusions.register(chain_fusion("two", [ops.ReLU, ops.SReLU], 0.0))
    model = sequential(ops.GELU(), ops.ReLU(), ops.SReLU(), ops.SiLU(), ops.Linear(8, 8))
    plan = model.plan(X)
    forward, backward = ({(s.start, s.stop) for s in steps} for steps in (plan.forward, plan.backward))
    assert (1, 3) in forward and (1, 3) not in backward
    assert_as_meant(model, X)


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


def test_only_what_somebody_reads_is_kept():
    model = mlp(memory="fast")
    assert kept(model, "parameter") == {"weight"}
    assert kept(model, "input") == {"input"}
    everything = kept(model)
    for p in model.parameters():
        p.requires_grad_(False)
    assert kept(model) < everything and not kept(model, x=X.detach())
    model[4].bias.requires_grad_(True)
    assert kept(model, x=X.detach()) == {"bias.output"}  # what the last GELU reads, and nothing before it


def test_biases_and_sums_keep_nothing():
    model = sequential(ops.Bias(8), ops.Add("c"), ops.Fork("a"), ops.Bias(8), ops.Add("a"), ops.Scale(value=2.0))
    assert model.plan(X, c=X).kept == ()
    assert_as_meant(model, X, c=tensor(6, 8, seed=2))


def test_a_dropout_mask_is_not_kept():
    model = sequential(ops.Dropout(0.5), ops.Bias(8))
    assert [(k.name, k.owner) for k in model.plan(X).kept] == [("seed", "statistic")]
    assert_as_meant(model, X)


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


LISTS = {
    "mlp": lambda **o: mlp(**o),
    "norm_between_products": lambda **o: sequential(
        ops.Linear(8, 8),
        ops.Bias(8),
        ops.RMSNorm(8),
        ops.Fork("a"),
        ops.Linear(8, 8),
        ops.Add("a"),
        ops.LayerNorm(8),
        **o,
    ),
    "one_value_for_two_products": lambda **o: sequential(
        ops.Linear(8, 8),
        ops.GELU(),
        ops.Fork("a"),
        ops.Linear(8, 8, bias=False),
        te_fuser.Residual(ops.Scale(8), ops.Linear(8, 8)),
        ops.Add("a"),
        ops.Linear(8, 8),
        **o,
    ),
    "residuals": lambda **o: sequential(
        te_fuser.Residual(
            ops.LayerNorm(8), ops.Linear(8, 8), te_fuser.Residual(ops.GELU(), ops.Dropout(0.5)), ops.Linear(8, 8)
        ),
        te_fuser.Residual(ops.RMSNorm(8), ops.Linear(8, 16), ops.GEGLU(), ops.Linear(8, 8)),
        **o,
    ),
    "outputs": lambda **o: sequential(
        ops.GELU(), ops.Output("a"), ops.Linear(8, 8), ops.SiLU(), ops.Output("b"), ops.Linear(8, 8), ops.L2Norm(), **o
    ),
}


@pytest.mark.parametrize("memory", ["fast", "lean", 0, 600])
@pytest.mark.parametrize("name", LISTS)
def test_every_choice_of_memory_is_right(name, memory):
    model = LISTS[name](memory=memory)
    outputs = ("a", "b") if name == "outputs" else ()
    assert_as_meant(model, X, outputs)
    assert_as_meant(model, X.detach(), outputs)


@pytest.mark.parametrize("name", LISTS)
def test_less_memory_is_kept_where_less_is_asked_for(name):
    held = [LISTS[name](memory=memory).plan(X).kept_bytes() for memory in ("fast", "balanced", "lean", 0)]
    assert held == sorted(held, reverse=True)
    if name != "outputs":
        assert held[-1] < held[0]


def test_what_is_computed_again_is_not_kept():
    plan = mlp(memory=0).plan(X)
    again = {c.value for c in plan.choices if c.recomputed}
    assert "layer_norm.output" in again
    assert not again & {k.name for k in plan.kept}
    assert any(ref.kind is RECOMPUTED for s in plan.backward for ref in s.writes())
    fast = mlp(memory="fast").plan(X)
    assert not any(c.recomputed for c in fast.choices)
    assert again <= {k.name for k in fast.kept}
    texts = [str(c) for c in (*plan.choices, *fast.choices)]
    assert any("computed again in backward" in t for t in texts) and any(": kept, " in t for t in texts)


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
    """What 5 to 8 rows keep is what fits with 8; what is shown is of the rows that there are."""
    plans = {rows: mlp(memory=2100).plan(tensor(rows, 8)) for rows in (4, 5, 7, 8)}
    assert {rows: plan.kept_bytes() for rows, plan in plans.items()} == {4: 4 * 320, 5: 5 * 256, 7: 7 * 256, 8: 8 * 256}


def test_a_backward_fusion_decides_what_is_kept():
    """It reads the output, so the input of its ops need not stay; without it the input stays."""

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
    shared = ops.Scale(8)
    model = sequential(shared, ops.Linear(8, 8), shared, ops.Linear(8, 8), ops.Add("c"), ops.Linear(8, 8), ops.Add("c"))
    c = tensor(6, 8, seed=3)
    sums = [s for s in model.plan(X, c=c).backward if s.name == "add_gradients"]
    assert sorted(len(s.inputs) for s in sums) == [2, 2]
    assert_as_meant(model, X, c=c)


def test_gradients_of_one_parameter_three_times():
    shared = ops.Linear(8, 8)
    model = sequential(shared, ops.GELU(), shared, ops.SiLU(), shared)
    sums = [s for s in model.plan(X).backward if s.name == "add_gradients"]
    assert sorted(len(s.inputs) for s in sums) == [3, 3]
    assert_as_meant(model, X)


# ------------------------------------------------------------------------------------------ plans as data


def test_steps_cover_the_list_once_in_order():
    for make in LISTS.values():
        plan = make().plan(X)
        spans = [(s.start, s.stop) for s in plan.forward if s.name != "cast_parameter"]
        assert spans == sorted(spans) and all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
        backward = [s.stop for s in plan.backward if s.chain]
        assert backward == sorted(backward, reverse=True)
        available = {k.ref for k in plan.kept}
        for step in plan.backward:
            missing = [
                r for r in step.reads() if (r.kind in (RECOMPUTED, VALUE, STATISTIC) or r.term) and r not in available
            ]
            assert not missing, (step.name, missing)
            available |= set(step.writes())


def test_the_time_of_a_plan_is_the_sum_of_its_steps_and_of_its_node():
    plan = mlp().plan(X)
    (segment,), host = plan.segments, plan.device.host
    node = sum(host.node) + host.gradient * sum(r is not None for r in segment.returned)
    assert plan.seconds() == pytest.approx(sum(s.seconds for s in (*plan.forward, *plan.backward)) + node)
    assert plan.seconds() == pytest.approx(plan.device_seconds() + plan.host_seconds())
    assert all(s.seconds > 0 for s in plan.forward if s.cost.launches)


def test_planning_for_a_device_that_is_absent_needs_no_memory():
    with torch.device("meta"):
        model = te_fuser.Sequential(ops.LayerNorm(4096), ops.Linear(4096, 16384), ops.GELU(), ops.Linear(16384, 4096))
        x = torch.empty(8192, 4096)
    plan = model.plan(x, device="h200")
    assert plan.device.name == "h200" and plan.target == "cuda"
    flops = 2 * 8192 * 4096 * 16384
    products = [s for s in plan.forward if s.cost.flops]
    assert len(products) == 2 and all(s.cost.flops == flops for s in products)
    assert all(flops / 1e15 < s.seconds < flops / 1e14 for s in products)
    with pytest.raises(ValueError, match="unknown device 'abacus'; known: cpu, h200"):
        model.plan(x, device="abacus")

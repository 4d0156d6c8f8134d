"""Providers on keys and values apart and on what hides by structure: taken in both directions, right, or a reason."""

from __future__ import annotations

import pytest
import torch

from te_fuser import fusions, ops
from tests.fusions.separate_attention import cases, tokens
from tests.twins import assert_as_meant, sequential, tensor

CPU = "attention_cpu_flash"


def taken(model, x, **inputs):
    plan = model.plan(x, **inputs)
    return [CPU in [s.name for s in steps] for steps in (plan.forward, plan.backward)]


def test_taken_both_ways_and_right():
    for name, model, x, inputs in cases():
        assert taken(model, x, **inputs) == [True, True], name
        assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("packing", ["interleaved", "blocked", "apart"])
def test_sequences_one_behind_the_other(packing):
    _, model, x, inputs = tokens(packing)
    assert taken(model, x, **inputs) == [True, True]
    assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("layout", ["batch_first", "sequence_first"])
@pytest.mark.parametrize("packing", ["interleaved", "blocked"])
def test_packed_heads_in_windows(layout, packing):
    mask = ops.AttentionMask(causal=True, window=(2, 0), lengths="lengths")
    op = ops.DotProductAttention(4, 4, kv_heads=2, mask=mask, layout=layout, packing=packing)
    rotary = ops.RotaryEmbedding(4, heads=4, kv_heads=2, layout=layout, packing=packing)
    model = sequential(ops.Linear(6, 32), rotary, op, ops.Linear(16, 6))
    x = tensor(3, 7, 6) if layout == "batch_first" else tensor(7, 3, 6)
    inputs = {"lengths": torch.tensor([7, 0, 2])}
    assert taken(model, x, **inputs) == [True, True]
    assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("size", [(1, 5), (5, 1), (0, 3), (3, 0), (13, 17)])
def test_odd_sizes(size):
    for _, model, x, inputs in cases(sizes=size):
        assert_as_meant(model, x, tolerance=1e-10, **inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_as_the_ops_own(dtype):
    for name, model, x, inputs in cases(8, dtype):
        y = model(x, **inputs)
        with fusions.only():
            want = model(x, **inputs)
        assert y.dtype == dtype and y.isfinite().all(), name
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(y, want, rtol=tolerance, atol=tolerance)


def test_only_what_needs_a_gradient_gets_one():
    _, model, x, inputs = next(cases())
    model.requires_grad_(False)
    for leaf in (x.detach(), *(t.detach() for t in inputs.values())):
        leaf.requires_grad_()
    x, value = x.detach(), inputs["value"].detach().requires_grad_()
    model(x, key=inputs["key"].detach(), value=value).sum().backward()
    assert value.grad is not None and x.grad is None


def reasons(op, x, **inputs):
    return {r.name: r.reason for r in sequential(op).plan(x, **inputs).refusals}


def test_reasons():
    def apart(**options):
        return ops.DotProductAttention(2, 4, **{"mask": "none", "packing": "apart", "layout": "batch_first", **options})

    x, inputs = tensor(3, 7, 8), {"key": tensor(3, 5, 8), "value": tensor(3, 5, 8)}
    wide = {**inputs, "value": tensor(3, 5, 10)}
    assert reasons(apart(packing=ops.Apart(value_dim=5)), x, **wide)[CPU] == (
        "heads of values have 5 features, those of keys 4"
    )
    capped = ops.AttentionScores(soft_cap=1.0, sink="zero")
    assert reasons(apart(scores=capped), x, **inputs)[CPU] == "it is not called for a soft cap and a sink"
    assert reasons(apart(), x, **{**inputs, "key": tensor(3, 5, 8, dtype=torch.float32)})[CPU] == (
        "queries are float64, keys or values float32"
    )
    one = {n: t[:, :1] for n, t in inputs.items()}
    assert reasons(apart(), x, **one)[CPU].startswith("with one position")


def test_backward_reads_the_keys_that_are_there():
    """A name with a question mark is read where the op has such an input, and nowhere else."""
    read = {}
    for packing in ("apart", "blocked", ops.Apart(key_value="memory")):
        op = ops.DotProductAttention(2, 4, packing=packing, layout="batch_first", mask="none")
        names = [given.name for given in op.named_inputs().values()]
        sizes = {"memory": 16, "key": 8, "value": 8}
        inputs = {name: tensor(3, 5, sizes[name]) for name in names}
        plan = sequential(op).plan(tensor(3, 5, op.packed.features), **inputs)
        (step,) = plan.backward
        read[str(packing)] = [name for name, _ in step.inputs if name.startswith("-1.") and name != "-1.input"]
    assert list(read.values()) == [["-1.key", "-1.value"], [], ["-1.key_value"]]

"""Attention beyond the packed one in lists: plans, gradients of named inputs, copies, autocast, no_grad."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

import te_fuser
from te_fuser import ops
from te_fuser.fuser import pipeline
from te_fuser.fuser.pipeline import make_plan
from tests.refused import raises
from tests.twins import assert_as_meant, sequential, tensor


def cross(**options):
    packing = ops.Apart(value_dim=5)
    op = ops.DotProductAttention(
        2, 4, **{"mask": "none", "kv_heads": 1, "packing": packing, "layout": "batch_first", **options}
    )
    return sequential(ops.Linear(6, 8), op, ops.Linear(10, 6))


def given(queries=7, keys=5, samples=3, dtype=torch.float64):
    shapes = {"key": (samples, keys, 4), "value": (samples, keys, 5)}
    inputs = {name: tensor(*shape, seed=n, dtype=dtype) for n, (name, shape) in enumerate(shapes.items())}
    return tensor(samples, queries, 6, dtype=dtype), inputs


def everything():
    """An op that asks for all there is, with its inputs."""
    mask = ops.AttentionMask(True, "bottom_right", (3, 2), "hide", "lengths", "key_lengths")
    scores = ops.AttentionScores(2.0, "bias", "slopes", "learned")
    inputs = {
        "hide": torch.rand(3, 1, 7, 5, generator=torch.Generator().manual_seed(0)) < 0.2,
        "lengths": torch.tensor([7, 0, 4]),
        "key_lengths": torch.tensor([5, 3, 0], dtype=torch.int32),
        "bias": tensor(1, 2, 7, 5, seed=3),
        "slopes": tensor(2, grad=False, seed=4).abs(),
    }
    return {"mask": mask, "scores": scores, "dropout": 0.25}, inputs


@pytest.mark.parametrize("size", [(7, 5, 3), (1, 5, 3), (7, 1, 3), (0, 5, 3), (7, 0, 3), (7, 5, 0), (13, 11, 1)])
def test_keys_and_values_get_gradients(size):
    x, inputs = given(*size)
    for mask in ("none", ops.AttentionMask(causal=True, corner="bottom_right")):
        assert_as_meant(cross(mask=mask), x, tolerance=1e-10, **inputs)


def test_everything_at_once():
    options, others = everything()
    x, inputs = given()
    model = cross(**options)
    y = assert_as_meant(model, x, tolerance=1e-10, **inputs, **others)[0]
    model.eval()
    assert not torch.equal(assert_as_meant(model, x, tolerance=1e-10, **inputs, **others)[0], y)
    with torch.no_grad():
        torch.testing.assert_close(model(x, **inputs, **others), model.reference(x, **inputs, **others))


def test_copies_and_strided_inputs():
    options, others = everything()
    x, inputs = given()
    model = cross(**{**options, "dropout": 0.0})
    want = model(x, **inputs, **others)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x, **inputs, **others), want)
        assert twin[1].mask == model[1].mask and twin[1].scores == model[1].scores
    spread = {n: torch.stack((t, t), -1)[..., 0] if t.dim() > 1 else t for n, t in {**inputs, **others}.items()}
    torch.testing.assert_close(model(x.transpose(0, 1).contiguous().transpose(0, 1), **spread), want)


def test_keys_and_values_from_forks():
    """Both are named by ops before: a cross attention inside one list."""
    op = ops.DotProductAttention(2, 4, packing="apart", layout="batch_first", mask="causal")
    model = sequential(ops.Linear(6, 8), ops.Fork("key"), ops.GELU(), ops.Fork("value"), ops.Linear(8, 8), op)
    assert_as_meant(model, tensor(3, 7, 6), tolerance=1e-10)


@pytest.mark.parametrize("packing", ["interleaved", "apart"])
def test_sequences_one_behind_the_other(packing):
    mask = ops.AttentionMask(causal=True, offsets="cu_seqlens")
    op = ops.DotProductAttention(2, 4, mask=mask, layout="tokens", packing=packing)
    model = sequential(ops.Linear(6, op.packed.features), op, ops.Linear(8, 6))
    inputs = {n: tensor(11, 8, seed=k) for k, n in enumerate(("key", "value"))} if packing == "apart" else {}
    offsets = torch.tensor([0, 3, 3, 8, 10], dtype=torch.int32)
    x = tensor(11, 6)
    y = assert_as_meant(model, x, tolerance=1e-10, cu_seqlens=offsets, **inputs)[0]
    # The plan holds for other sequences, and each is attended to by itself.
    other = torch.tensor([0, 3, 5, 8, 10], dtype=torch.int32)
    changed = assert_as_meant(model, x, tolerance=1e-10, cu_seqlens=other, **inputs)[0]
    assert torch.equal(changed[:3], y[:3]) and not torch.equal(changed[5:8], y[5:8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_near(dtype):
    options, others = everything()
    options["dropout"] = 0.0
    x, inputs = given()
    exact, model = cross(**options), cross(**options).to(dtype)
    exact.load_state_dict(model.state_dict())
    low = {n: t.to(dtype) if t.is_floating_point() else t for n, t in {**inputs, **others}.items()}
    high = {n: t.double() if t.is_floating_point() else t for n, t in low.items()}
    model[1].sink.data = model[1].sink.data.float()  # sinks may stay in float32
    y = model(x.to(dtype), **low)
    assert y.dtype == dtype
    torch.testing.assert_close(y.double(), exact(x.to(dtype).double(), **high), rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert model[1].sink.grad.dtype == torch.float32


def test_autocast_and_verified():
    options, others = everything()
    x, inputs = given(dtype=torch.float32)
    model = cross(**{**options, "dropout": 0.0}).float()
    others = {n: t.float() if t.is_floating_point() else t for n, t in others.items()}
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x, **inputs, **others)
        want = model.reference(x, **inputs, **others)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y, want, rtol=0.05, atol=0.05)
    y.float().sum().backward()
    assert inputs["key"].grad.dtype == torch.float32 and inputs["key"].grad.isfinite().all()
    assert te_fuser.verify(model, x, **inputs, **others).passed


def test_a_missing_input_is_named():
    x, inputs = given()
    raises(ValueError, "value", lambda: cross()(x, key=inputs["key"]))
    with pytest.raises(ValueError, match=r"'key' has 3 features; DotProductAttention takes 1 heads, that is 4"):
        cross()(x, key=inputs["key"][..., :3], value=inputs["value"])


@pytest.mark.parametrize("scores", [None, ops.AttentionScores(soft_cap=1.0, alibi=True)])
def test_one_plan_for_many_lengths(scores, monkeypatch):
    """Nothing that is asked of sizes ties a plan to one of them."""
    made = []
    monkeypatch.setattr(pipeline, "make_plan", lambda *given: made.append(0) or make_plan(*given))
    apart = ops.AttentionMask(causal=True, corner="bottom_right", key_lengths="n")
    models = {
        "apart": ops.DotProductAttention(2, 4, packing="apart", mask=apart, layout="batch_first", scores=scores),
        "packed": ops.DotProductAttention(
            2, 4, mask=ops.AttentionMask(lengths="n"), layout="batch_first", scores=scores
        ),
        "tokens": ops.DotProductAttention(2, 4, mask=ops.AttentionMask(offsets="n"), layout="tokens", scores=scores),
    }
    for name, op in models.items():
        model = sequential(op)
        made.clear()
        for length in (64, 61, 57, 40):
            x = tensor(3, length, 8 if name == "apart" else 24)
            others = {n: tensor(3, length - 5, 8) for n in ("key", "value")} if name == "apart" else {}
            model(x[0] if name == "tokens" else x, n=torch.arange(3), **others).sum().backward()
        assert len(made) == 1, name
